"""Templates: Jinja2 with everything escaped that does not say it is safe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined


def render(name: str, values: Mapping[str, Any]) -> str:
    """A page; a name the template asks for and did not get is an error."""
    environment = Environment(
        loader=PackageLoader("drivetrain.view.page", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name).render(values)

"""Templates: Jinja2 with everything escaped that does not say it is safe."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from drivetrain.view.palette import COLOURS, SHADES, UNKNOWN, Colour, css_of


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


def style_sheet() -> Markup:
    """All of it, to stand inside the page."""
    written = files(__package__).joinpath("style.css").read_text(encoding="utf-8")
    return Markup(written + _palette())  # noqa: S704 - both are ours, and css is not html


def _palette() -> str:
    colours = {**COLOURS, "unknown": UNKNOWN}
    shades = {f"shade-{index}": shade for index, shade in enumerate(SHADES)}
    by_variable: dict[str, Colour] = {name.replace("_", "-"): c for name, c in colours.items()}
    by_variable |= shades
    light = "".join(f"--{name}:{colour.light};" for name, colour in by_variable.items())
    dark = "".join(f"--{name}:{colour.dark};" for name, colour in by_variable.items())
    rules = [f":root{{{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}"]
    classes = {css_of(name): name.replace("_", "-") for name in colours} | {s: s for s in shades}
    rules += [
        f".{css}{{fill:var(--{name});background:var(--{name})}}" for css, name in classes.items()
    ]
    return "\n".join(rules)

"""Optional libraries, imported where they are used; a missing one names the extra to install."""

from __future__ import annotations

import importlib
from types import ModuleType

from drivetrain.core.errors import EnvironmentProblem, Problem


def require(module: str, *, extra: str) -> ModuleType:
    """Import `module`, or say which extra of Drivetrain brings it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise EnvironmentProblem(
            [
                Problem(
                    where=module,
                    rule="this optional library is not installed",
                    remedy=f"pip install 'drivetrain[{extra}]'",
                    has_value=False,
                )
            ]
        ) from error

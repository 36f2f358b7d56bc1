"""Plugins, registered by name: built in, or by another package through an entry point.

    [project.entry-points."drivetrain.strategies"]
    signs = "drivetrain_signs:TRAITS"

A reference is `module:attribute`, as in an entry point, and is imported only when it is used.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import cache, cached_property
from typing import Any

from drivetrain.core.errors import EnvironmentProblem, Problem


def load(reference: str) -> Any:
    """Import and return what `module:attribute` refers to."""
    module, _, attribute = reference.partition(":")
    return getattr(importlib.import_module(module), attribute)


@cache
def _installed() -> Any:
    """Return all installed entry points; cached, because the scan takes tens of milliseconds."""
    from importlib.metadata import entry_points

    return entry_points()


class Plugins:
    """Everything that is registered in one entry-point group, by name."""

    def __init__(self, group: str, built_in: Mapping[str, str] | str) -> None:
        """Create a group. `built_in` maps names to references, or is a reference to such a map."""
        self.group = group
        self._built_in = built_in

    @cached_property
    def references(self) -> Mapping[str, str]:
        """References by name, the built-in ones first."""
        table = self._built_in
        found: dict[str, str] = dict(load(table) if isinstance(table, str) else table)
        for point in sorted(_installed().select(group=self.group), key=lambda point: point.name):
            if found.setdefault(point.name, point.value) != point.value:
                rule = f"two packages register it ({found[point.name]} and {point.value})"
                raise EnvironmentProblem([self._problem(rule, point.name)])
        return found

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.references)

    def load(self, name: str) -> Any:
        """Import and return the plugin with this name."""
        try:
            return load(self.references[name])
        except (ImportError, AttributeError) as error:
            rule = f"cannot be loaded from {self.references[name]} ({error})"
            raise EnvironmentProblem([self._problem(rule, name)]) from error

    def _problem(self, rule: str, name: str) -> Problem:
        return Problem(self.group, rule, "fix or uninstall the package that registers it", name)

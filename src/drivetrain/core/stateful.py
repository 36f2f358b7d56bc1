"""Stateful: objects whose state can be saved and restored."""

from __future__ import annotations

from typing import Any, Protocol


class Stateful(Protocol):
    """Any object with these two methods: an EMA, a StatefulDataLoader, a hook."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that it needs to resume."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> Any:
        """Resume from a saved state."""
        ...

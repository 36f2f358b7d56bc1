"""What can be saved and loaded again."""

from __future__ import annotations

from typing import Any, Protocol


class Stateful(Protocol):
    """Anything with these two methods: an EMA, a StatefulDataLoader, a hook."""

    def state_dict(self) -> dict[str, Any]:
        """What it must be given to resume."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> Any:
        """Resume from there."""
        ...

"""Settings: the supervisor's options from the command line."""

from __future__ import annotations

from dataclasses import dataclass, field

from drivetrain.supervise.policy import Budgets
from drivetrain.supervise.stall import Patience


@dataclass(frozen=True)
class Settings:
    """The supervisor's settings on this node."""

    command: tuple[str, ...]
    """The script and its arguments."""
    is_python: bool = True
    budgets: Budgets = field(default_factory=Budgets)
    patience: Patience = field(default_factory=Patience)
    grace_s: float = 30.0
    spares: int | None = None
    """Warm processes kept ready; None: one per worker."""
    live: bool = False
    """Whether ranks are replicas that are replaced one by one, while the others continue."""
    warm_start: bool = False
    """Import once and fork the first ranks too, not only their replacements."""

"""The number of steps after which a torch scheduler ends, where it states one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, SequentialLR


@dataclass(frozen=True)
class ScheduleLength:
    """How long a schedule is, by its own settings."""

    name: str
    """The class that states it."""
    setting: str
    """The setting that states it."""
    steps: int
    """How often it is stepped until it ends."""
    ends_hard: bool
    """Whether torch raises when it is stepped more often."""
    rises_again: bool
    """Whether its rate rises again when it is stepped more often."""

    @classmethod
    def of(cls, scheduler: Any) -> ScheduleLength | None:
        """Return the length of a scheduler that is made for a whole run, or None.

        A LinearLR may be only a warm-up, and a StepLR has no end. The end of a sequence is that of
        its last part.
        """
        if isinstance(scheduler, OneCycleLR):
            return cls("OneCycleLR", "total_steps", scheduler.total_steps, True, False)
        if isinstance(scheduler, CosineAnnealingLR):
            return cls("CosineAnnealingLR", "T_max", int(scheduler.T_max), False, True)
        if isinstance(scheduler, SequentialLR):
            return cls._of_sequence(vars(scheduler))
        return None

    @classmethod
    def _of_sequence(cls, parts: dict[str, Any]) -> ScheduleLength | None:
        schedulers: Sequence[Any] = parts.get("_schedulers", ())
        milestones: Sequence[int] = parts.get("_milestones", ())
        last = cls.of(schedulers[-1]) if schedulers and milestones else None
        if last is None:
            return None
        setting = f"{last.setting} {last.steps} from step {milestones[-1]}"
        steps = milestones[-1] + last.steps
        return cls(last.name, setting, steps, last.ends_hard, last.rises_again)

"""A runner whose trials are over as soon as they are started: a real driver without processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from drivetrain.launch.target import State as JobState
from drivetrain.launch.target import Status, target_type
from drivetrain.tune.decide import Work
from drivetrain.tune.journal import Asked, Ended
from drivetrain.tune.settings import Study
from drivetrain.tune.trial_run import Runner, local_job


@dataclasses.dataclass(frozen=True)
class Instant(Runner):
    """What each comes to is a function of its values and rung."""

    result_of: Callable[[Asked, Work], Ended] = lambda asked, work: Ended(
        work.trial, work.rung, "done", 4, float(asked.trial)
    )
    started: list[Work] = dataclasses.field(default_factory=list)
    asked: dict[int, Asked] = dataclasses.field(default_factory=dict)

    def status(self, asked: Asked, rung: int) -> Status | None:
        is_there = Work(asked.trial, rung) in self.started
        return Status(JobState.FINISHED) if is_there else None

    def start(self, asked: Asked, rung: int, running: Iterable[int]) -> bool:
        self.started.append(Work(asked.trial, rung))
        self.asked[asked.trial] = asked
        return True

    def result(self, work: Work, status: Status, num_resumed: int) -> Ended | None:
        return self.result_of(self.asked[work.trial], work)


def instant(study: Study, **changes: object) -> Instant:
    return Instant(study, target_type("local")(), local_job(study), **changes)  # type: ignore[arg-type]

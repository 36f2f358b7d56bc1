"""A study whose trials are computed instead of trained: what the driver does, in one process."""

from __future__ import annotations

import random
from collections.abc import Callable

from drivetrain.tune import decide, population, sampling
from drivetrain.tune.journal import Asked, Ended, Fork, Journal, Promoted, State
from drivetrain.tune.settings import Study

Objective = Callable[[Study, decide.Work, State], Ended]
"""What a run would have come to."""


def search(made: Study, objective: Objective, num_workers: int, seed: int, kills: int = 0) -> State:
    """Workers end in any order; now and then the driver forgets everything but its journal."""
    rng = random.Random(seed)  # noqa: S311
    journal, running = Journal(made.path), set[decide.Work]()
    while True:
        if kills and rng.random() < 0.2:
            kills, running, journal = kills - 1, set(), Journal(made.path)
        state = journal.state
        if made.settings.population and (due := population.next_fork(made, state)) is not None:
            journal.write(as_entry(due))
            continue
        if made.settings.schedule == "eager":
            for work in decide.newly_promoted(made.settings, state):
                journal.write(Promoted(work.trial, work.rung))
        for work in decide.ready(made.settings, state):
            if len(running) < num_workers:
                running.add(work)
        if len(running) < num_workers and decide.next_trial(made.settings, state) is not None:
            journal.write(sampling.ask(made, state))
            continue
        if not running:
            return state
        work = rng.choice(sorted(running))
        running.remove(work)
        journal.write(objective(made, work, state))


def as_entry(due: population.Due) -> Asked:
    """A fork as the journal has it; nothing looks for its checkpoint."""
    return Asked(due.trial, due.values, Fork(due.donor, due.rung, due.step, due.member, "x"))

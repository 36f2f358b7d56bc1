"""A run's directory as values: of a run that is over, that goes on, or that lies far away.

    run = open_run("runs/gpt")                  # or s3://bucket/gpt; no torch is needed
    run.attempts()                              # every attempt: from when to when, why it ended
    run.ranks                                   # those that have written anything
    run.steps(rank)                             # NumPy records: where each step's seconds went
    run.matrix("own_s")                         # (ranks × steps): the same over all ranks
    run.scalars()["train/loss"]                 # steps, times and values
    run.events(rank), run.tail(rank)            # spans, scalars and instants of a rank

Nothing is kept: each call reads. What goes on being written is followed by `EventFollower` and
`StepFollower`, which read a file's new end only.
"""

from drivetrain.record.reading.files import (
    Event,
    EventFollower,
    Series,
    StepFollower,
    StepMatrix,
    duration_s,
    is_redone,
    own_s,
)
from drivetrain.record.reading.run import PastAttempt, RunReading, open_run

__all__ = [
    "Event",
    "EventFollower",
    "PastAttempt",
    "RunReading",
    "Series",
    "StepFollower",
    "StepMatrix",
    "duration_s",
    "is_redone",
    "open_run",
    "own_s",
]

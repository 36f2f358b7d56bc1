"""Read a run directory: of a finished, running or remote run.

    run = open_run("runs/gpt")                  # or s3://bucket/gpt; no torch is needed
    run.attempts()                              # every attempt: start, end and reason
    run.ranks                                   # ranks that have written anything
    run.steps(rank)                             # NumPy records: where each step's seconds went
    run.matrix("own_s")                         # (ranks × steps): the same over all ranks
    run.scalars()["train/loss"]                 # steps, times and values
    run.events(rank), run.tail(rank)            # spans, scalars and instants of a rank

Attempts, steps and events are read again by each call. `EventFollower` and `StepFollower` follow a
file that is still being written and read only what is new.
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

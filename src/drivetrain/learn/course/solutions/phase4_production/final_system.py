"""A training that loses and gains members: one world after another, from one checkpoint."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

QUIET_S = 0.6
BEAT_S, SLOW_AFTER_S, DEAD_AFTER_S = 0.1, 1.0, 1.5
MIN_MEMBERS = 1


def train(parts: Any, store: Any, name: str, folder: Path, job: Any) -> None:
    """Train `job` to its last step, with the processes that are there."""
    while job.step < job.num_steps:
        world = parts.rendezvous.join(store, name, MIN_MEMBERS, QUIET_S)
        rank = world.members.index(name)
        try:
            job.connect(world.number, rank, len(world.members))
            train_in(world, rank, parts, store, folder, job)
        except (job.Interrupted, RuntimeError):
            # A member has left or a process has joined. The remaining ones agree on the next world.
            pass
        finally:
            job.disconnect()


def train_in(world: Any, rank: int, parts: Any, store: Any, folder: Path, job: Any) -> None:
    """Train until all steps are done or this world is over."""
    # Every rank has the whole state, and rank 0's shard exists whatever the world's size was.
    newest = parts.checkpoint.load_newest(folder, 0)
    if newest is not None:
        parts.resume.restore(job, newest[1])
    heartbeat = parts.failure_detection.Heartbeat(store, rank, BEAT_S)
    heartbeat.start()
    is_over = watch(world, parts, store)
    try:
        if newest is None:
            # So that there is a state to go back to if the first steps are lost.
            parts.checkpoint.save(folder, job.step, parts.resume.capture(job))
        while job.step < job.num_steps and not is_over():
            job.one_step(is_over)
            heartbeat.step_done()
            if job.step % job.save_every == 0 or job.step == job.num_steps:
                parts.checkpoint.save(folder, job.step, parts.resume.capture(job))
    finally:
        # Otherwise it would beat for the member with this rank in the next world.
        heartbeat.stop()


def watch(world: Any, parts: Any, store: Any) -> Callable[[], bool]:
    """Return a function that returns whether this world is over."""
    detection, ranks = parts.failure_detection, range(len(world.members))
    detector = detection.Detector(len(ranks), SLOW_AFTER_S, DEAD_AFTER_S, time.monotonic())

    def is_over() -> bool:
        for rank in ranks:
            detector.observe(rank, *detection.read(store, rank), time.monotonic())
        now = time.monotonic()
        is_lost = any(detector.state(rank, now) == "dead" for rank in ranks)
        return is_lost or parts.rendezvous.somebody_waits(store, world)

    return is_over

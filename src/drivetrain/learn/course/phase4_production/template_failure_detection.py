"""Exercise failure_detection: which ranks are dead, and which are only slow?

Guidelines: guidelines.md, part 3. Check: drivetrain learn check failure_detection
"""

from typing import Any


class Detector:
    """What the observer concludes, using only its own clock.

    alive   beats and makes steps
    slow    beats, but has made no step for slow_after_s
    dead    no new beat for dead_after_s
    """

    def __init__(
        self, num_ranks: int, slow_after_s: float, dead_after_s: float, now_s: float
    ) -> None:
        # TODO 1: no rank has sent a beat yet, and none is dead yet.
        raise NotImplementedError("TODO 1 of Detector.__init__")

    def observe(self, rank: int, beats: int, steps: int, now_s: float) -> None:
        """Take what `read` returned at now_s; called often, mostly with nothing new."""
        # TODO 2
        raise NotImplementedError("TODO 2 of Detector.observe")

    def state(self, rank: int, now_s: float) -> str:
        """Return "alive", "slow" or "dead"."""
        # TODO 3
        raise NotImplementedError("TODO 3 of Detector.state")


class Heartbeat:
    """Tells the store that this process is alive, whatever its training is doing."""

    def __init__(self, store: Any, rank: int, interval_s: float) -> None:
        # TODO 4: store is torch's TCPStore: set(key, text), get(key) → bytes, check([key]) → bool.
        raise NotImplementedError("TODO 4 of Heartbeat.__init__")

    def start(self) -> None:
        """Begin to send a beat every interval_s."""
        # TODO 5: independently of the training, which may be busy for minutes.
        raise NotImplementedError("TODO 5 of Heartbeat.start")

    def step_done(self) -> None:
        """Called by the training after each step; the next beat reports it."""
        # TODO 6
        raise NotImplementedError("TODO 6 of Heartbeat.step_done")

    def stop(self) -> None:
        """Stop the beats, so that the process can exit."""
        # TODO 7
        raise NotImplementedError("TODO 7 of Heartbeat.stop")


def read(store: Any, rank: int) -> tuple[int, int]:
    """Return a rank's beats and steps so far, (0, 0) before its first. Must not wait."""
    # TODO 8: store.get waits for a key that does not exist.
    raise NotImplementedError("TODO 8 of read")

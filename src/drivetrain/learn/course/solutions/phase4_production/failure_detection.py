"""Heartbeats independent of the training, and an observer that uses its own clock."""

import threading
from typing import Any


class Heartbeat:
    """Tells the store that this process is alive, whatever its training is doing."""

    def __init__(self, store: Any, rank: int, interval_s: float) -> None:
        self.store, self.rank, self.interval_s = store, rank, interval_s
        self.steps = 0
        self.is_over = threading.Event()
        self.thread = threading.Thread(target=self.beat, daemon=True)

    def start(self) -> None:
        """Begin to send a beat every interval_s."""
        self.thread.start()

    def beat(self) -> None:
        """Run in its own thread, so that a step of minutes does not hold it up."""
        beats = 0
        while True:
            beats += 1
            self.store.set(f"beat/{self.rank}", f"{beats} {self.steps}")
            if self.is_over.wait(self.interval_s):
                return

    def step_done(self) -> None:
        """Called by the training after each step."""
        self.steps += 1

    def stop(self) -> None:
        """Stop the beats, so that the process can exit."""
        self.is_over.set()
        self.thread.join()


def read(store: Any, rank: int) -> tuple[int, int]:
    """Return a rank's beats and steps so far, (0, 0) before its first."""
    if not store.check([f"beat/{rank}"]):
        return 0, 0
    beats, steps = store.get(f"beat/{rank}").decode().split()
    return int(beats), int(steps)


class Detector:
    """What the observer concludes, using only its own clock."""

    def __init__(
        self, num_ranks: int, slow_after_s: float, dead_after_s: float, now_s: float
    ) -> None:
        self.slow_after_s, self.dead_after_s = slow_after_s, dead_after_s
        self.seen = dict.fromkeys(range(num_ranks), (0, 0))
        self.beat_s = dict.fromkeys(self.seen, now_s)
        self.step_s = dict.fromkeys(self.seen, now_s)

    def observe(self, rank: int, beats: int, steps: int, now_s: float) -> None:
        """Take what `read` returned at now_s."""
        before = self.seen[rank]
        # Different, not larger: a restarted process counts from 1.
        if beats != before[0]:
            self.beat_s[rank] = now_s
        if steps != before[1]:
            self.step_s[rank] = now_s
        self.seen[rank] = (beats, steps)

    def state(self, rank: int, now_s: float) -> str:
        """Decide by when the observer last saw a change, not by the rank's clock."""
        if now_s - self.beat_s[rank] > self.dead_after_s:
            return "dead"
        return "slow" if now_s - self.step_s[rank] > self.slow_after_s else "alive"

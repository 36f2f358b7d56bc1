"""Heartbeats beside the training, and an observer that goes by its own clock."""

import threading
from typing import Any


class Heartbeat:
    """Tells the store that this process lives, whatever its training does at the moment."""

    def __init__(self, store: Any, rank: int, interval_s: float) -> None:
        self.store, self.rank, self.interval_s = store, rank, interval_s
        self.steps = 0
        self.is_over = threading.Event()
        self.thread = threading.Thread(target=self.beat, daemon=True)

    def start(self) -> None:
        """From now on, a beat every interval_s."""
        self.thread.start()

    def beat(self) -> None:
        """In a thread of its own: a step of minutes does not hold it up."""
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
        """No more beats; the process can end."""
        self.is_over.set()
        self.thread.join()


def read(store: Any, rank: int) -> tuple[int, int]:
    """Beats and steps of a rank so far; (0, 0) before its first."""
    if not store.check([f"beat/{rank}"]):
        return 0, 0
    beats, steps = store.get(f"beat/{rank}").decode().split()
    return int(beats), int(steps)


class Detector:
    """What the observer concludes, by its own clock only."""

    def __init__(
        self, num_ranks: int, slow_after_s: float, dead_after_s: float, now_s: float
    ) -> None:
        self.slow_after_s, self.dead_after_s = slow_after_s, dead_after_s
        self.seen = dict.fromkeys(range(num_ranks), (0, 0))
        self.beat_s = dict.fromkeys(self.seen, now_s)
        self.step_s = dict.fromkeys(self.seen, now_s)

    def observe(self, rank: int, beats: int, steps: int, now_s: float) -> None:
        """What `read` returned at now_s."""
        before = self.seen[rank]
        # Other than before, not more: a process that was started again counts from 1.
        if beats != before[0]:
            self.beat_s[rank] = now_s
        if steps != before[1]:
            self.step_s[rank] = now_s
        self.seen[rank] = (beats, steps)

    def state(self, rank: int, now_s: float) -> str:
        """By when something new was last heard, not by what its clock says."""
        if now_s - self.beat_s[rank] > self.dead_after_s:
            return "dead"
        return "slow" if now_s - self.step_s[rank] > self.slow_after_s else "alive"

"""StallWatch and IdleWatch: when is a rank that says nothing no longer just slow?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from drivetrain.diagnose.stacks import Stacks
from drivetrain.record.session import Phase, RankProgress

# StallWatch: when is a rank that says nothing no longer just slow?
#
# The time-out is learned from the run's own steps, which each rank times itself, so that none is
# too quick to be seen: ten times the slowest of the recent ones, never less than a floor. Starting,
# saving, evaluating and compiling take as long as they take, up to a longer limit; while one rank
# compiles the others may have to wait for it, and are given as much time more. Pure: time comes in
# as a number.

_TIMES_SLOWEST = 10.0


@dataclass(frozen=True)
class Patience:
    """Seconds without progress that are still normal."""

    stepping_s: float = 60.0
    """At least; learned upwards."""
    otherwise_s: float = 900.0
    """While starting, saving, evaluating, compiling."""


@dataclass(frozen=True)
class Stall:
    """A rank that has made no progress for too long."""

    local_rank: int
    progress: RankProgress
    silent_s: float
    allowed_s: float

    def __str__(self) -> str:
        doing = "compiling" if self.progress.is_compiling else self.progress.phase.name.lower()
        return (
            f"no progress for {self.silent_s:.1f} s after step {self.progress.step} ({doing}; "
            f"{self.allowed_s:.1f} s are allowed)"
        )


@dataclass
class StallWatch:
    """Judges one node's ranks."""

    patience: Patience
    leniency: float = 1.0
    """Doubled after each stall, so that something rare and slow gets through the second time."""
    _compiled_s: float = float("-inf")
    """When a rank was last seen compiling."""

    def observe(self, pages: Sequence[RankProgress | None], now_s: float) -> Stall | None:
        """The rank furthest behind of those that have been silent for too long, if any."""
        at_work = [
            (rank, page)
            for rank, page in enumerate(pages)
            if page is not None and page.phase is not Phase.ENDED
        ]
        slowest_s = max((page.slowest_step_s for _, page in at_work), default=0.0)
        if any(page.is_compiling for _, page in at_work):
            self._compiled_s = now_s
        stalls = [
            Stall(rank, page, silent_s, allowed_s)
            for rank, page in at_work
            if (silent_s := now_s - page.at_s) > (allowed_s := self.allowed_s(page, slowest_s))
        ]
        return min(stalls, key=lambda stall: stall.progress.step, default=None)

    def allowed_s(self, page: RankProgress, slowest_s: float) -> float:
        """How long a rank may be silent, where the slowest recent step took `slowest_s`."""
        longest_s = self.patience.otherwise_s * self.leniency
        is_stepping = page.phase is Phase.STEPPING and not page.is_compiling
        if not is_stepping or not slowest_s:  # how long a step takes is not known
            return longest_s
        step_s = max(self.patience.stepping_s, _TIMES_SLOWEST * slowest_s) * self.leniency
        waited_s = max(0.0, self._compiled_s - page.at_s)  # perhaps for the one that compiled
        return step_s + min(waited_s, longest_s)


# IdleWatch: have all ranks of a node stopped computing?
#
# For scripts that report no progress. Ranks that wait for each other in torch.distributed use no
# processor; so do ranks that sleep or wait for a disk, so that their stacks have the last word.
# Pure: time and processor seconds come in as values.

EVERY_S = 0.5
"""Between two looks: long enough for the system's clock ticks of 10 ms to say something."""
_BUSY_SHARE = 0.05


@dataclass
class IdleWatch:
    """Of one node."""

    _before: dict[int, float] = field(default_factory=dict)
    """Processor seconds at the last look, by process."""
    _looked_s: float = 0.0
    _since_s: float = 0.0

    def observe(self, processor_s: Mapping[int, float], now_s: float) -> float:
        """For how many seconds no process has computed; at most one look each EVERY_S counts."""
        elapsed_s = now_s - self._looked_s
        if elapsed_s < EVERY_S:
            return max(0.0, self._looked_s - self._since_s)
        is_busy = not processor_s or any(
            pid not in self._before or used_s - self._before[pid] > _BUSY_SHARE * elapsed_s
            for pid, used_s in processor_s.items()
        )
        if is_busy:
            self._since_s = now_s
        self._before, self._looked_s = dict(processor_s), now_s
        return now_s - self._since_s


def is_deadlock(
    stacks: Mapping[int, Stacks | None], idle_s: float, patience: Patience, *, has_peers: bool
) -> bool:
    """Whether ranks that have been idle for so long wait for each other.

    All of a run's ranks in a call of torch.distributed can wait for nobody else. Where some are
    elsewhere, or on other nodes, what they do may only be slow. Where none is in such a call, the
    script waits for something of its own, as long as it likes.
    """
    waiting = [each is not None and _waits(each) for each in stacks.values()]
    if not any(waiting):
        return False
    is_certain = all(waiting) and not has_peers
    return idle_s > (patience.stepping_s if is_certain else patience.otherwise_s)


def _waits(stacks: Stacks) -> bool:
    """In a collective, or in sending and receiving; joining a group waits for other launchers."""
    main = stacks.main
    if main is None or main.is_in("torch/distributed/distributed_c10d.py", "init_process_group"):
        return False
    return main.is_in_collective

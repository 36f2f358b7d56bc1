"""StallWatch and IdleWatch: tell a hung rank from a slow one, and where it hangs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from drivetrain.diagnose.finding import listed
from drivetrain.diagnose.stacks import Stacks
from drivetrain.record.session import Phase, RankProgress

# StallWatch: when does a rank that reports no progress count as hung?
#
# The timeout is learned from the run's own steps: ten times the slowest of the recent ones, but
# never less than a minimum. Each rank times its own steps, so that even the fastest are seen.
# Starting, saving, evaluating and compiling have a longer, fixed limit. While one rank compiles,
# the others may have to wait for it, so they are given that much more time. Pure: time is an
# argument.

_TIMES_SLOWEST = 10.0
_MORE_LENIENT, _MOST_LENIENT = 4.0, 64.0


@dataclass(frozen=True)
class Patience:
    """How many seconds without progress are still normal."""

    stepping_s: float = 60.0
    """While stepping: the minimum; slower steps raise it."""
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
    """Detects stalls of one node's ranks."""

    patience: Patience
    leniency: float = 1.0
    """Raised after each stall, so that a slow operation succeeds the second time."""
    _compiled_s: float = float("-inf")
    """When a rank was last seen compiling."""

    def be_more_lenient(self) -> None:
        """Allow more time; a second stall at the same place is the last one that is retried."""
        self.leniency = min(self.leniency * _MORE_LENIENT, _MOST_LENIENT)

    def observe(self, pages: Sequence[RankProgress | None], now_s: float) -> Stall | None:
        """Return the stalled rank that is furthest behind, or None."""
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
        """Return how long a rank may be silent if the slowest recent step took `slowest_s`."""
        longest_s = self.patience.otherwise_s * self.leniency
        is_stepping = page.phase is Phase.STEPPING and not page.is_compiling
        if not is_stepping or not slowest_s:  # the duration of a step is not known
            return longest_s
        step_s = max(self.patience.stepping_s, _TIMES_SLOWEST * slowest_s) * self.leniency
        waited_s = max(0.0, self._compiled_s - page.at_s)  # perhaps for the rank that compiled
        return step_s + min(waited_s, longest_s)


# IdleWatch: have all ranks of a node stopped computing?
#
# For scripts that report no progress. Ranks that wait for each other in torch.distributed use no
# CPU time, but neither do ranks that sleep or wait for a disk: their stacks decide.
# Pure: time and CPU seconds are arguments.

EVERY_S = 0.5
"""Seconds between two samples: long compared with the system's clock ticks of 10 ms."""
_BUSY_SHARE = 0.05


@dataclass
class IdleWatch:
    """Measures how long the ranks of one node have been idle."""

    _before: dict[int, float] = field(default_factory=dict)
    """CPU seconds at the last sample, by process."""
    _looked_s: float = 0.0
    _since_s: float = 0.0

    def observe(self, processor_s: Mapping[int, float], now_s: float) -> float:
        """Return for how many seconds no process has computed; samples at most every EVERY_S."""
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
    """True if ranks that have been idle for `idle_s` are waiting for each other.

    If all ranks of the run are in a torch.distributed call, they can only be waiting for each
    other. If some are elsewhere, or on other nodes, those may just be slow. If none is in such a
    call, the script waits for something else, for as long as it likes.
    """
    waiting = [each is not None and _waits(each) for each in stacks.values()]
    if not any(waiting):
        return False
    is_certain = all(waiting) and not has_peers
    return idle_s > (patience.stepping_s if is_certain else patience.otherwise_s)


def hang_place(stacks: Mapping[int, Stacks | None]) -> str:
    """Return the line at which each rank hangs; empty if that of one of them is not known."""
    places: dict[str, list[int]] = {}
    for rank, each in sorted(stacks.items()):
        if each is None or each.main is None or not each.main.frames:
            return ""
        inner, users = each.main.frames[0], each.main.user_frame
        place = f"{inner}, from {users}" if users not in (None, inner) else str(inner)
        places.setdefault(place, []).append(rank)
    return "; ".join(f"{listed(ranks)} at {place}" for place, ranks in places.items())


def _waits(stacks: Stacks) -> bool:
    """True in a collective, send or receive; init_process_group may wait for other launchers."""
    main = stacks.main
    if main is None or main.is_in("torch/distributed/distributed_c10d.py", "init_process_group"):
        return False
    return main.is_in_collective

"""IdleWatch: have all ranks of a node stopped computing?

For scripts that report no progress. Ranks that wait for each other in torch.distributed use no
processor; so do ranks that sleep or wait for a disk, so that their stacks have the last word.
Pure: time and processor seconds come in as values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from drivetrain.diagnose.stacks import Stacks
from drivetrain.supervise.stall import Patience

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

"""A fault script: what breaks, when and where.

    Faults().kill_at(12, rank=1).corrupt_shard(20).kill_at(25, point="save").preempt_at(40)

Steps are the run's. `point` says when within a step: at any time, while a checkpoint is being
written, or while the run recovers from the previous fault. `draw` makes a random script from a
seed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

Kind = Literal[
    "kill",
    "stop",
    "hang",
    "slow",
    "partition",
    "fill_disk",
    "corrupt_shard",
    "kill_supervisor",
    "kill_node",
    "preempt",
    "full_at_end",
    "spoil_claim",
    "read_only",
    "skew",
]
Point = Literal["step", "save", "recovery"]
ONE_HOST: tuple[Kind, ...] = (
    "kill",
    "stop",
    "hang",
    "slow",
    "fill_disk",
    "corrupt_shard",
    "kill_supervisor",
    "preempt",
)
TWO_HOSTS: tuple[Kind, ...] = (*ONE_HOST, "partition", "kill_node", "skew")
FOR_A_PERSON: dict[Kind, int] = {"full_at_end": 8, "spoil_claim": 4, "read_only": 8}
"""Faults that a run cannot fix by itself: it ends with this exit code, and resumes once they are
fixed."""
ONE_HOST_ALL: tuple[Kind, ...] = (*ONE_HOST, *FOR_A_PERSON)
BY_HOOK: tuple[Kind, ...] = ("hang",)
"""Injected from inside the run, by a hook."""
ON_SMALL_DISK = ("fill_disk", "full_at_end", "read_only")


@dataclass(frozen=True)
class Fault:
    """One fault to inject."""

    kind: Kind
    step: int
    """Injected once this many steps are done."""
    rank: int = 0
    """For faults of a rank: its number in the run."""
    host: int = 0
    """For faults of a node: its number."""
    point: Point = "step"
    delay_s: float = 0.0
    """Delay after the point is reached."""
    duration_s: float = 3.0
    """For temporary faults: slow, partition, fill_disk."""
    skew_s: float = 0.0
    """Error of a host's clock from the start; at `step` its supervisor is killed."""

    def __str__(self) -> str:
        where = f"host {self.host}" if self.kind in _OF_A_HOST else f"rank {self.rank}"
        return f"{self.kind} {where} at step {self.step} ({self.point})"


_OF_A_HOST = ("partition", "kill_supervisor", "kill_node", "preempt", "skew")


@dataclass(frozen=True)
class Faults:
    """A sequence of faults; each method returns a longer one."""

    faults: tuple[Fault, ...] = ()

    def kill_at(self, step: int, rank: int = 0, point: Point = "step") -> Faults:
        """SIGKILL a rank."""
        return self._with(Fault("kill", step, rank, point=point))

    def stop_at(self, step: int, rank: int = 0) -> Faults:
        """SIGSTOP a rank: the process exists, but does nothing."""
        return self._with(Fault("stop", step, rank))

    def hang_at(self, step: int, rank: int = 0) -> Faults:
        """Hang a rank: it runs, but never reaches its next collective."""
        return self._with(Fault("hang", step, rank))

    def slow_at(self, step: int, rank: int = 0, duration_s: float = 3.0) -> Faults:
        """Give a rank a fifth of its processor time for a while."""
        return self._with(Fault("slow", step, rank, duration_s=duration_s))

    def partition_at(self, step: int, duration_s: float = 3.0) -> Faults:
        """Drop all network traffic between the hosts for a while."""
        return self._with(Fault("partition", step, duration_s=duration_s))

    def fill_disk_at(self, step: int, duration_s: float = 3.0) -> Faults:
        """Fill the checkpoints' disk for a while."""
        return self._with(Fault("fill_disk", step, duration_s=duration_s))

    def corrupt_shard(self, step: int, rank: int = 0) -> Faults:
        """Flip a bit of the newest checkpoint, then kill a rank."""
        return self._with(Fault("corrupt_shard", step, rank))

    def kill_supervisor(self, step: int, host: int = 0) -> Faults:
        """SIGKILL the supervisor; its ranks die with it."""
        return self._with(Fault("kill_supervisor", step, host=host))

    def kill_node(self, step: int, host: int = 0) -> Faults:
        """End everything on a host at once; the scheduler starts it again."""
        return self._with(Fault("kill_node", step, host=host))

    def preempt_at(self, step: int, host: int = 0) -> Faults:
        """SIGTERM a node, as a scheduler does; it is started again once it has ended."""
        return self._with(Fault("preempt", step, host=host))

    def skew(self, step: int, host: int = 0, skew_s: float = 600.0) -> Faults:
        """Run a host with a wrong clock, and make the nodes rendezvous again."""
        return self._with(Fault("skew", step, host=host, skew_s=skew_s))

    def full_at_end(self, step: int) -> Faults:
        """Fill the checkpoints' disk until an operator makes room."""
        return self._with(Fault("full_at_end", step))

    def spoil_claim(self, step: int, rank: int = 0) -> Faults:
        """Truncate the newest claim to 0 bytes, then kill a rank."""
        return self._with(Fault("spoil_claim", step, rank))

    def read_only(self, step: int) -> Faults:
        """Make the checkpoints' disk read-only until an operator remounts it."""
        return self._with(Fault("read_only", step))

    def _with(self, fault: Fault) -> Faults:
        return replace(self, faults=(*self.faults, fault))


def draw(
    seed: int, kinds: Sequence[Kind], steps: tuple[int, int], num_ranks: int, num_hosts: int
) -> Faults:
    """A random script: one fault, sometimes a second during the recovery from it."""
    chance = random.Random(seed)  # noqa: S311 - it must be repeatable
    kind = kinds[seed % len(kinds)]
    first = Fault(
        kind=kind,
        step=chance.randint(*steps),
        rank=chance.choice([0, chance.randrange(num_ranks)]),
        host=chance.choice([0, chance.randrange(num_hosts)]),
        point=chance.choice(["step", "step", "save"]) if kind in ("kill", "preempt") else "step",
        delay_s=chance.uniform(0, 0.1),
        duration_s=chance.uniform(2.0, 4.0),
        skew_s=chance.choice([-600.0, 600.0]) if kind == "skew" else 0.0,
    )
    faults = [first]
    if kind in ("kill", "corrupt_shard") and chance.random() < 0.25:
        again = replace(first, kind="kill", point="recovery", delay_s=chance.uniform(0, 0.6))
        faults.append(replace(again, rank=chance.randrange(num_ranks)))
    return Faults(tuple(faults))

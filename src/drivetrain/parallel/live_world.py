"""LiveWorld: a process that is a replica of its own, among others that come and go.

It stands in no process group and in a layout of one rank; who else takes part is said by each
step's quorum. Whoever sits first in it speaks for the run, so that the run never falls silent.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from drivetrain.cluster.environments import Identity
from drivetrain.parallel.layout import Layout
from drivetrain.parallel.world import World, device_of


@dataclass
class ReplicaRank:
    """This replica's place in the latest quorum."""

    rank: int
    num_replicas: int


@dataclass(frozen=True)
class LiveWorld(World):
    """`identity` is the replica's name; its world size is how many the job was started with."""

    seat: ReplicaRank = field(default_factory=lambda: ReplicaRank(0, 1))

    @property
    def is_main(self) -> bool:
        """Whether this replica speaks for the run at present."""
        return self.seat.rank == 0

    @property
    def rank(self) -> int:
        """Inside its own group it is alone; `identity.rank` tells the replicas apart."""
        return 0


def live_world(identity: Identity) -> LiveWorld:
    """Meets nobody yet: the first quorum does."""
    seat = ReplicaRank(identity.rank, identity.world_size)
    return LiveWorld(identity, Layout(), device_of(identity), None, seat=seat)

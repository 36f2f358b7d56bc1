"""Exercise rendezvous: processes that come and go agree on who is in.

Guidelines: guidelines.md, part 4. Check: drivetrain learn check rendezvous
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class World:
    """Who trains together, until somebody is lost or somebody comes."""

    number: int
    """1 for the first world, 2 for the next …"""
    members: tuple[str, ...]
    """Names; a member's rank is its place here."""


def join(store: Any, name: str, min_members: int, quiet_s: float) -> World:
    """Wait for the next world to be agreed upon, and return it: the same to all its members.

    It is closed when it has min_members or more and nobody new has come for quiet_s. Who comes
    later waits for the world after it. Anybody may be killed at any moment, the first one too; who
    is killed while waiting may or may not be among the members.

    store is torch's TCPStore, on which each of these happens as a whole:
    set(key, text), get(key) → bytes (waits for the key), check([key]) → bool,
    add(key, n) → the new sum, compare_set(key, "", text) → bytes: sets the key if it is not there,
    and returns what is there afterwards.
    """
    # TODO 1: which world is next? Put your name down for it.
    # TODO 2: wait until it is closed. Whoever sees that it can be closed tries to; one succeeds.
    # TODO 3: are you in it? Otherwise try the next one.
    raise NotImplementedError("TODO 1 to 3 of join")


def somebody_waits(store: Any, world: World) -> bool:
    """Whether anybody has put their name down for the world after this one."""
    # TODO 4: this must not wait.
    raise NotImplementedError("TODO 4 of somebody_waits")

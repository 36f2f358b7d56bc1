"""Exercise rendezvous: processes that join and leave agree on the members.

Guidelines: guidelines.md, part 4. Check: drivetrain learn check rendezvous
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class World:
    """The processes that train together, until one is lost or a new one joins."""

    number: int
    """1 for the first world, 2 for the next …"""
    members: tuple[str, ...]
    """Names; a member's rank is its place here."""


def join(store: Any, name: str, min_members: int, quiet_s: float) -> World:
    """Wait until the next world is agreed upon, and return it, the same to all its members.

    It is closed when it has min_members or more and no process has joined for quiet_s. A process
    that comes later waits for the world after it. Any process may be killed at any moment, even
    the first; one that is killed while it waits may or may not be among the members.

    store is torch's TCPStore, on which each of these calls is atomic:
    set(key, text), get(key) → bytes (waits for the key), check([key]) → bool,
    add(key, n) → the new sum, compare_set(key, "", text) → bytes: sets the key if it does not
    exist, and returns the value stored afterwards.
    """
    # TODO 1: which world is next? Register your name for it.
    # TODO 2: wait until it is closed. Any process that sees it can be closed tries; one succeeds.
    # TODO 3: if you are not in it, try the next one.
    raise NotImplementedError("TODO 1 to 3 of join")


def somebody_waits(store: Any, world: World) -> bool:
    """True if any process has registered for the world after this one."""
    # TODO 4: this must not block.
    raise NotImplementedError("TODO 4 of somebody_waits")

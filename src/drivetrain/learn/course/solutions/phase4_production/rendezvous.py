"""A rendezvous without a leader: any process may try to close the world, and one succeeds."""

import json
import time
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class World:
    """The processes that train together, until one is lost or a new one joins."""

    number: int
    members: tuple[str, ...]


def join(store: Any, name: str, min_members: int, quiet_s: float) -> World:
    """Wait until the next world is agreed upon, and return it, the same to all its members."""
    number = 1
    while True:
        if not store.check([f"{number}/members"]):
            place = store.add(f"{number}/count", 1)
            store.set(f"{number}/name/{place}", name)
            members = wait_until_closed(store, number, min_members, quiet_s)
            # It may have been closed between the check and the registration.
            if name in members:
                return World(number, members)
        number += 1


def wait_until_closed(store: Any, number: int, min_members: int, quiet_s: float) -> tuple[str, ...]:
    """Return the members, as the first process to close the world has written them."""
    seen, since = 0, time.monotonic()
    while not store.check([f"{number}/members"]):
        count = store.add(f"{number}/count", 0)
        if count != seen:
            seen, since = count, time.monotonic()
        if count >= min_members and time.monotonic() - since > quiet_s:
            places = [f"{number}/name/{place}" for place in range(1, count + 1)]
            # A process may have been killed between taking its number and writing its name.
            names = [store.get(place).decode() for place in places if store.check([place])]
            # Only the first write succeeds: the others get what that one has written.
            store.compare_set(f"{number}/members", "", json.dumps(names))
        time.sleep(0.02)
    return tuple(json.loads(store.get(f"{number}/members")))


def somebody_waits(store: Any, world: World) -> bool:
    """True if any process has registered for the world after this one."""
    return bool(store.add(f"{world.number + 1}/count", 0) > 0)

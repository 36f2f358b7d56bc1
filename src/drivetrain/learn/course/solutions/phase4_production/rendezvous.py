"""A rendezvous without a leader: whoever sees that a world can be closed tries to, one succeeds."""

import json
import time
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class World:
    """Who trains together, until somebody is lost or somebody comes."""

    number: int
    members: tuple[str, ...]


def join(store: Any, name: str, min_members: int, quiet_s: float) -> World:
    """Wait for the next world to be agreed upon, and return it: the same to all its members."""
    number = 1
    while True:
        if not store.check([f"{number}/members"]):
            place = store.add(f"{number}/count", 1)
            store.set(f"{number}/name/{place}", name)
            members = wait_until_closed(store, number, min_members, quiet_s)
            # It may have been closed between the question and the signature.
            if name in members:
                return World(number, members)
        number += 1


def wait_until_closed(store: Any, number: int, min_members: int, quiet_s: float) -> tuple[str, ...]:
    """The members, as whoever was first has written them down."""
    seen, since = 0, time.monotonic()
    while not store.check([f"{number}/members"]):
        count = store.add(f"{number}/count", 0)
        if count != seen:
            seen, since = count, time.monotonic()
        if count >= min_members and time.monotonic() - since > quiet_s:
            places = [f"{number}/name/{place}" for place in range(1, count + 1)]
            # Somebody may have been killed between the number and the name.
            names = [store.get(place).decode() for place in places if store.check([place])]
            # Only the first of all who try: the others find what that one has written.
            store.compare_set(f"{number}/members", "", json.dumps(names))
        time.sleep(0.02)
    return tuple(json.loads(store.get(f"{number}/members")))


def somebody_waits(store: Any, world: World) -> bool:
    """Whether anybody has put their name down for the world after this one."""
    return bool(store.add(f"{world.number + 1}/count", 0) > 0)

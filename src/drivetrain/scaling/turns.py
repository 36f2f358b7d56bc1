"""Take turns with processes that another library has started, through a store.

Our ranks decide when a block runs; the others wait on the store, which uses no CPU time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import TCPStore

from drivetrain.core.errors import WorkerFailure

_PATIENCE = timedelta(seconds=600)
_POLL_S = 0.2


class Turns:
    """One group of such processes at one setting, identified by `key`."""

    def __init__(self, store: Any, key: str, num_ranks: int) -> None:
        self._store, self._key, self._num_ranks = store, key, num_ranks

    # on our side

    def wait_until_ready(self, is_alive: Callable[[], bool], tail: Callable[[], str]) -> None:
        """Wait until all of them are ready; raise WorkerFailure if their launcher fails."""
        keys, deadline_s = self._of_all("ready"), time.monotonic() + _PATIENCE.total_seconds()
        while not self._store.check(keys):
            if not is_alive() or time.monotonic() > deadline_s:
                raise WorkerFailure(f"{self._key}: its workers did not start\n{tail()}")
            time.sleep(_POLL_S)

    def block(self, number: int, *, is_main: bool) -> float:
        """Let them run one block; return the first one's seconds. Call it on all our ranks."""
        if is_main:
            self._store.set(f"{self._key}/go/{number}", "run")
        self._store.wait(self._of_all(f"done/{number}"), _PATIENCE)
        return float(self._store.get(f"{self._key}/done/{number}/0"))

    def end(self, number: int, *, is_main: bool) -> list[float]:
        """End the blocks; return the losses of each step."""
        if is_main:
            self._store.set(f"{self._key}/go/{number}", "end")
        self._store.wait([f"{self._key}/losses"], _PATIENCE)
        losses: list[float] = json.loads(self._store.get(f"{self._key}/losses"))
        return losses

    def _of_all(self, what: str) -> list[str]:
        return [f"{self._key}/{what}/{rank}" for rank in range(self._num_ranks)]

    # on theirs

    def take(
        self, rank: int, block: Callable[[], float], losses: Callable[[], list[float]]
    ) -> None:
        """Run a block whenever told to, until told to end."""
        self._store.set(f"{self._key}/ready/{rank}", "1")
        number = 0
        while True:
            self._store.wait([f"{self._key}/go/{number}"], _PATIENCE)
            if self._store.get(f"{self._key}/go/{number}") == b"end":
                break
            self._store.set(f"{self._key}/done/{number}/{rank}", str(block()))
            number += 1
        found = losses()
        if rank == 0:
            self._store.set(f"{self._key}/losses", json.dumps(found))


def open_store(host: str) -> TCPStore:
    return TCPStore(host, 0, is_master=True, wait_for_workers=False)


def reach_store(host: str, port: int) -> TCPStore:
    return TCPStore(host, port, is_master=False)

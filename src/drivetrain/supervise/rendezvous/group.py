"""Group: the other nodes of a run, as one of them sees them: join, finish together, leave."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from enum import Enum
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import WorkerGroup
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousHandler,
)

from drivetrain.supervise.failures.reporting import say
from drivetrain.supervise.policy import PREEMPTED_CODE, STALE_CODE
from drivetrain.supervise.rendezvous.handler import FolderRendezvous

_MEMBERSHIP_S = 0.5
_ATTEMPTS_TO_JOIN = 5
_STORE_PATIENCE_S = 3.0
_GOES_ALONE = frozenset({PREEMPTED_CODE, STALE_CODE})


class JoinResult(Enum):
    """How an attempt to join went."""

    JOINED = "a group was formed"
    FAILED = "it could not be formed"
    CLOSED = "the other nodes have ended the run"


class Others(Enum):
    """What the other nodes are doing when this one has finished."""

    FINISHED = "finished too"
    AT_WORK = "not finished yet"
    LOST = "the first node is gone, and the run is not over"


class Group:
    """The nodes of a run; `rendezvous` is torchelastic's way to join, which fills in `workers`."""

    def __init__(self, workers: WorkerGroup, rendezvous: Callable[[WorkerGroup], None]) -> None:
        self._workers = workers
        self._rendezvous = rendezvous
        self._next_look_s = 0.0
        self._lost_store_s: float | None = None

    @property
    def _handler(self) -> RendezvousHandler:
        return self._workers.spec.rdzv_handler

    def join(self) -> JoinResult:
        """Form a group with the other nodes; those that gave up have closed it.

        A node may be lost while the others join: then they join again, without it.
        """
        for _ in range(_ATTEMPTS_TO_JOIN):
            try:
                self._rendezvous(self._workers)
            except (RendezvousClosedError, RendezvousGracefulExitError):
                return JoinResult.CLOSED
            except (RendezvousError, DistError, OSError, StopIteration, KeyError) as error:
                reason = (str(error) or type(error).__name__).splitlines()[0]
                say(f"the nodes could not join ({reason}); retrying")
            else:
                self._next_look_s = time.monotonic() + _MEMBERSHIP_S
                return JoinResult.JOINED
        return JoinResult.FAILED

    @property
    def was_closed_finished(self) -> bool:
        """Whether those who closed it had finished the run; otherwise they gave up."""
        handler = self._handler
        return isinstance(handler, FolderRendezvous) and handler.has_finished

    def nodes_are_waiting(self) -> bool:
        """Whether somebody wants to join; asked for now and then only."""
        now_s = time.monotonic()
        if now_s < self._next_look_s:
            return False
        self._next_look_s = now_s + _MEMBERSHIP_S
        try:
            return bool(self._handler.num_nodes_waiting() > 0)
        except RendezvousError:  # not to be reached just now; asked again in a moment
            return False

    def finish(self, attempt: int) -> Others:
        """Say that this node's ranks have finished, and look at the others."""
        num_nodes = self._workers.group_world_size or 1
        if num_nodes == 1:
            return Others.FINISHED
        store: Any = self._workers.store
        own = f"finished-{attempt}-{self._workers.group_rank}"
        try:
            if store.add(own, 0) == 0:
                store.add(own, 1)
                store.add("finished", 1)
            return Others.FINISHED if store.add("finished", 0) >= num_nodes else Others.AT_WORK
        except Exception:  # the first node has gone: with the end of the run, or before it
            return self._without_store()

    def _without_store(self) -> Others:
        """Who saw all nodes finish has closed the group; a first node that is lost has not."""
        now_s = time.monotonic()
        self._lost_store_s = self._lost_store_s or now_s
        with contextlib.suppress(Exception):
            if self._handler.is_closed():
                return Others.FINISHED
        if now_s - self._lost_store_s > _STORE_PATIENCE_S:
            self._lost_store_s = None
            return Others.LOST
        return Others.AT_WORK

    def close(self, exit_code: int) -> None:
        """A node that stops for good ends the run for all; one that was preempted only leaves."""
        if exit_code in _GOES_ALONE:
            return
        handler = self._handler
        with contextlib.suppress(Exception):
            if exit_code == 0 and isinstance(handler, FolderRendezvous):
                handler.close_finished()
            else:
                handler.set_closed()

    def leave(self, exit_code: int) -> None:
        """The last that the other nodes hear of this one."""
        handler = self._handler
        with contextlib.suppress(Exception):  # the store may be gone with its node
            if exit_code in _GOES_ALONE and isinstance(handler, FolderRendezvous):
                handler.leave()
            else:
                handler.shutdown()

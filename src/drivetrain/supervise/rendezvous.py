"""Meeting in a folder: a rendezvous that does not die with the first node.

torchelastic's own rendezvous, with its state in a file that every node can reach (the run
directory, on a shared file system) instead of in a server on node 0. Each round gets a store of its
own, served by whichever node is first in it, so that nothing of a dead attempt can be dialled.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import random
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.api import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    RendezvousSettings,
    RendezvousTimeout,
    _BackendRendezvousStateHolder,
    _RendezvousExitOp,
)

from drivetrain.core.files import write_whole

_VERSION = struct.Struct("<Q")
_POLL_S = 0.02
_TRIES = 3
_FINISHED = "finished"
_FIRST_PAUSE_S, _MOST_LOSSES = 0.002, 9


class FolderBackend(RendezvousBackend):
    """Compare-and-set on a file, under a lock the system releases when its holder dies."""

    def __init__(self, folder: Path) -> None:
        self._state = folder / "state"
        self._lock = folder / "lock"
        self._losses = 0
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def name(self) -> str:
        """As torch calls it."""
        return "folder"

    def get_state(self) -> tuple[bytes, int] | None:
        """The state and its version; writers rename, so a reader needs no lock."""
        for _ in range(_TRIES):
            try:
                data = self._state.read_bytes()
            except FileNotFoundError:
                return None
            except OSError as error:  # a file system that is shared has its moments
                problem = error
                time.sleep(0.1)
            else:
                return data[_VERSION.size :], _VERSION.unpack_from(data)[0]
        raise RendezvousConnectionError(str(problem)) from problem

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, int, bool] | None:
        """Write if nobody else has since `token` was read.

        Of many who join at once one gets through and the others must read again. They wait for a
        random time first, twice as long after each loss, so that hundreds of nodes do not read and
        rewrite each other's state without end.
        """
        with self._locked():
            version = self._version()
            if version == (token or 0):
                try:
                    write_whole(self._state, _VERSION.pack(version + 1) + state)
                except OSError as error:
                    raise RendezvousConnectionError(str(error)) from error
                self._losses = 0
                return state, version + 1, True
        self._losses = min(self._losses + 1, _MOST_LOSSES)
        time.sleep(random.uniform(0, _FIRST_PAUSE_S * 2**self._losses))  # noqa: S311 - no secret
        current = self.get_state()
        return None if current is None else (*current, False)

    def _version(self) -> int:
        """0 when there is no state; the state itself is not read."""
        try:
            with self._state.open("rb") as file:
                return int(_VERSION.unpack(file.read(_VERSION.size))[0])
        except FileNotFoundError:
            return 0
        except OSError as error:
            raise RendezvousConnectionError(str(error)) from error

    def forget_the_dead(self, alive_within: timedelta) -> bool:
        """Begin anew when the state is of a run that is over: closed, and nobody has a pulse."""
        with self._locked():
            current = self.get_state()
            if current is None:
                return True
            state = pickle.loads(current[0])  # noqa: S301 - written by the other supervisors
            youngest = max(state.last_heartbeats.values(), default=None)
            now = datetime.now(UTC)
            if state.closed and (youngest is None or now - youngest > alive_within):
                self._state.unlink()
                folder = self._state.parent  # rounds are counted from 0 again
                for old in (*folder.glob("store-*"), folder / _FINISHED):
                    old.unlink(missing_ok=True)
                return True
            return False

    @contextmanager
    def _locked(self) -> Iterator[None]:
        descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


class FolderRendezvous(DynamicRendezvousHandler):
    """torchelastic's rounds, with a store per round."""

    def __init__(
        self,
        folder: Path,
        settings: RendezvousSettings,
        address: str,
        listener: socket.socket | None = None,
    ) -> None:
        backend = FolderBackend(folder)
        node = self._node_desc_generator.generate(address)
        holder = _BackendRendezvousStateHolder(backend, settings, cache_duration=0)
        super().__init__(node, settings, backend.name, None, holder)  # type: ignore[arg-type]
        self._folder = folder
        self._address = address
        self._listener = listener
        self.backend = backend
        self._is_first = True

    @property
    def round(self) -> int:
        """Counts the groups that were formed; the same number on every node of a group."""
        return int(self._state_holder.state.round)

    @property
    def use_agent_store(self) -> bool:
        """Workers are clients of the store of the round."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next round; the first time, what a run that is over has left is cleared."""
        if self._is_first:
            self._is_first = False
            alive_s = self.settings.keep_alive_interval * self.settings.keep_alive_max_attempt
            deadline_s = time.monotonic() + 2 * alive_s.total_seconds()
            while self.is_closed() and time.monotonic() < deadline_s:
                if not self.backend.forget_the_dead(alive_s):
                    time.sleep(0.2)
        return super().next_rendezvous()

    def close_finished(self) -> None:
        """The run is done: a node that comes late has nothing to do, and has not failed."""
        (self._folder / _FINISHED).touch()
        self.set_closed()

    @property
    def has_finished(self) -> bool:
        """Whether the nodes that closed the group had finished the run."""
        return (self._folder / _FINISHED).exists()

    def leave(self) -> None:
        """Go, and let the others go on without this node."""
        self._stop_heartbeats()
        self._op_executor.run(_RendezvousExitOp(), time.monotonic() + 5)

    def _get_store(self) -> Store:
        rank, _ = self._get_world()
        published = self._folder / f"store-{self.round}"
        timeout = timedelta(seconds=60)
        if rank == 0:
            store = self._serve(timeout)
            write_whole(published, f"{self._address} {store.port} {self._this_node}")
            self._shared_tcp_store_server = store
            self._bootstrap_store_info = RendezvousStoreInfo(self._address, store.port)
            return store
        address, port = self._published(published, timeout)
        self._bootstrap_store_info = RendezvousStoreInfo(address, port)
        return TCPStore(address, port, is_master=False, timeout=timeout)

    def _serve(self, timeout: timedelta) -> TCPStore:
        """A store of this round's; where somebody listens for it already, there."""
        port, descriptor = 0, None
        if self._listener is not None:
            port, descriptor = self._listener.getsockname()[1], self._listener.detach()
            self._listener = None
        return TCPStore(
            "0.0.0.0",  # noqa: S104 - the other nodes are its clients
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timeout,
            master_listen_fd=descriptor,
        )

    def _published(self, path: Path, timeout: timedelta) -> tuple[str, int]:
        """Where this round's first node serves its store; what an earlier run left is not it."""
        deadline_s = time.monotonic() + timeout.total_seconds()
        state = self._state_holder.state
        first = next(str(node) for node, rank in state.participants.items() if rank == 0)
        while time.monotonic() < deadline_s:
            try:
                address, port, node = path.read_text().split(" ", 2)
            except (FileNotFoundError, ValueError):
                time.sleep(_POLL_S)
                continue
            if node == first:
                return address, int(port)
            time.sleep(_POLL_S)
        raise RendezvousTimeoutError(f"{first} did not open its store within {timeout}")


def meet_in_folder(
    folder: Path,
    nodes: tuple[int, int],
    address: str,
    settings: dict[str, Any],
    listener: socket.socket | None = None,
) -> FolderRendezvous:
    """A handler for `nodes` = (fewest, most); `settings` are torchrun's --rdzv-conf.

    The first round's store is served on `listener`, where there is one.
    """
    timeout = RendezvousTimeout(
        join=timedelta(seconds=int(settings.get("join_timeout", 600))),
        last_call=timedelta(seconds=int(settings.get("last_call_timeout", 5))),
    )
    chosen = RendezvousSettings(
        run_id=folder.name,
        min_nodes=nodes[0],
        max_nodes=nodes[1],
        timeout=timeout,
        keep_alive_interval=timedelta(seconds=int(settings.get("keep_alive_interval", 3))),
        keep_alive_max_attempt=int(settings.get("keep_alive_max_attempt", 4)),
    )
    return FolderRendezvous(folder, chosen, address, listener)

"""FolderRendezvous: a rendezvous that survives the loss of the first node.

It is torchelastic's rendezvous with its state in a file that every node can reach (in the run
directory, on a shared file system) instead of in a server on node 0. Each round has its own store,
served by the first node of that round, so that nothing can connect to the store of a dead attempt.
"""

from __future__ import annotations

import contextlib
import socket
import time
from datetime import timedelta
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
    RendezvousSettings,
    RendezvousTimeout,
    _RendezvousExitOp,
)

from drivetrain.core.bounded import read_text
from drivetrain.core.files import write_whole
from drivetrain.supervise.rendezvous.folder import FINISHED, RendezvousFolder
from drivetrain.supervise.rendezvous.rules import ListOfNodes, Orderly

_POLL_S = 0.02


class FolderRendezvous(DynamicRendezvousHandler):
    """torchelastic's rendezvous in a directory, with a store per round."""

    def __init__(
        self,
        folder: Path,
        settings: RendezvousSettings,
        address: str,
        listener: socket.socket | None = None,
    ) -> None:
        members = RendezvousFolder(folder)
        node = self._node_desc_generator.generate(address)
        nodes = ListOfNodes(members, settings)
        super().__init__(node, settings, "folder", None, nodes)  # type: ignore[arg-type]
        self._op_executor = Orderly(node, nodes, settings, members)
        self._nodes = nodes
        self._folder = folder
        self._address = address
        self._listener = listener
        self.members = members
        self._is_first = True

    @property
    def round(self) -> int:
        """Counts the groups that have formed; the same number on every node of a group."""
        return int(self._state_holder.state.round)

    @property
    def use_agent_store(self) -> bool:
        """True: workers are clients of the round's store."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next round; the first time, clear the state of a run that is over."""
        if self._is_first:
            self._is_first = False
            alive_s = self.settings.keep_alive_interval * self.settings.keep_alive_max_attempt
            deadline_s = time.monotonic() + 2 * alive_s.total_seconds()
            while self.is_closed() and time.monotonic() < deadline_s:
                if not self.members.forget_the_dead(self._nodes.is_dead):
                    time.sleep(0.2)
        self.members.signs.give(self._this_node)  # before other nodes can see it in the list
        return super().next_rendezvous()

    def _record(self, *_: object, **__: object) -> None:
        """Do nothing: torch's events go nowhere, and naming one reads all callers' source."""

    def close_finished(self) -> None:
        """Close the group of a finished run: a node that joins later has not failed."""
        (self._folder / FINISHED).touch()
        self.set_closed()

    @property
    def has_finished(self) -> bool:
        """Whether the nodes that closed the group had finished the run."""
        return (self._folder / FINISHED).exists()

    def leave(self) -> None:
        """Leave; the other nodes continue without this one."""
        self._stop_heartbeats()
        self._op_executor.run(_RendezvousExitOp(), time.monotonic() + 5)
        self.members.signs.say_goodbye(self._this_node)

    def shutdown(self) -> bool:
        """Leave, and end the run for all nodes."""
        is_closed = super().shutdown()
        self.members.signs.say_goodbye(self._this_node)
        return is_closed

    def _keep_alive(self) -> None:
        """Give a sign of life; torch's timer calls this."""
        with contextlib.suppress(RendezvousConnectionError):  # the next one may succeed
            self.members.signs.give(self._this_node)

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
        """Start this round's store, on the existing listener if there is one."""
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
        """Wait for the address of this round's store; ignore what an earlier run has left."""
        deadline_s = time.monotonic() + timeout.total_seconds()
        state = self._state_holder.state
        first = next(str(node) for node, rank in state.participants.items() if rank == 0)
        while time.monotonic() < deadline_s:
            try:
                address, port, node = read_text(path).split(" ", 2)
            except (FileNotFoundError, ValueError):
                time.sleep(_POLL_S)
                continue
            if node == first:
                return address, int(port)
            time.sleep(_POLL_S)
        raise RendezvousTimeoutError(f"{first} did not start its TCPStore within {timeout}")


def join_in_folder(
    folder: Path,
    nodes: tuple[int, int],
    address: str,
    settings: dict[str, Any],
    listener: socket.socket | None = None,
) -> FolderRendezvous:
    """Create a handler for `nodes` = (minimum, maximum); `settings` are torchrun's --rdzv-conf.

    The first round's store is served on `listener` if there is one.
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

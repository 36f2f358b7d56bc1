"""The lighthouse of a live run: where replicas find each other, step by step (torchft).

One per job, kept by the supervisor of the first node. A replica that is lost is missed after ten
heartbeats; one that is expected is waited for much longer, since those who began without it would
train a history of their own.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from drivetrain.core.requirements import require

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import WorkerGroup

ADDRESS = "TORCHFT_LIGHTHOUSE"
LIVE = "DRIVETRAIN_LIVE"
_LOST_AFTER_MS = 1000
_JOIN_WITHIN_MS = 600_000


class Lighthouse:
    """Serves from this process."""

    def __init__(self, host: str) -> None:
        os.environ.setdefault("RUST_LOG", "warn")  # read on import; else four lines a step
        coordination: Any = require("torchft.coordination", extra="live")
        self._server = coordination.LighthouseServer(
            bind="[::]:0",
            min_replicas=1,
            join_timeout_ms=_JOIN_WITHIN_MS,
            quorum_tick_ms=20,
            heartbeat_timeout_ms=_LOST_AFTER_MS,
        )
        port = self._server.address().rpartition(":")[2].rstrip("/")
        self.address = f"http://{host}:{port}"

    def close(self) -> None:
        """Serve no more."""
        self._server.shutdown()


class SharedLighthouse:
    """The job's one, whichever node keeps it."""

    def __init__(self) -> None:
        self._own: Lighthouse | None = None

    def address(self, group: WorkerGroup) -> str:
        """The first node keeps it; the others ask the round's store."""
        store: Any = group.store
        if group.group_rank == 0:
            self._own = self._own or Lighthouse(str(group.master_addr))
            store.set("lighthouse", self._own.address)
        return str(store.get("lighthouse").decode())

    def close(self) -> None:
        """Serve no more, where it is this node's."""
        if self._own is not None:
            self._own.close()

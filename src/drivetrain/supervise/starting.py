"""Starter: starts the ranks of an attempt, each with its environment."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerGroup
from torch.distributed.elastic.multiprocessing.api import Std
from torch.distributed.elastic.multiprocessing.tail_log import TailLog

from drivetrain.core.requirements import require
from drivetrain.record.session import COMMAND_S, LAUNCHED_S
from drivetrain.supervise.attempt import NodeAttempt
from drivetrain.supervise.processes.head_start import HeadStart
from drivetrain.supervise.processes.node import Node
from drivetrain.supervise.processes.worker import STDERR, STDOUT
from drivetrain.supervise.settings import Settings

# Where the ranks' output goes: to the terminal, or to files (--redirects, --tee, --log-dir).

_STREAMS = ((Std.OUT, STDOUT, "stdout"), (Std.ERR, STDERR, "stderr"))


class Logs:
    """Log files per rank, if requested; all attempts append to them."""

    def __init__(
        self,
        log_dir: str | None = None,
        redirects: Std | Mapping[int, Std] = Std.NONE,
        tee: Std | Mapping[int, Std] = Std.NONE,
    ) -> None:
        self._redirects, self._tee = redirects, tee
        self._folder: Path | None = None
        if redirects != Std.NONE or tee != Std.NONE:
            self._folder = Path(log_dir or tempfile.mkdtemp(prefix="drivetrain-logs-"))
        self._tails: list[TailLog] = []

    def environment(self, rank: int) -> dict[str, str]:
        """Return the variables that redirect a worker's output to its files."""
        wanted = _of(self._redirects, rank) | _of(self._tee, rank)
        return {
            variable: str(self._path(rank, name))
            for bit, variable, name in _STREAMS
            if self._folder is not None and wanted & bit
        }

    def follow(self, ranks: Sequence[int]) -> None:
        """Start printing teed output; all attempts use the same files."""
        if self._tails:
            return
        for bit, _, name in _STREAMS:
            teed = [rank for rank in ranks if _of(self._tee, rank) & bit]
            if teed:
                target = sys.stdout if bit is Std.OUT else sys.stderr
                files = {rank: str(self._path(rank, name)) for rank in teed}
                self._tails.append(TailLog("rank", files, target).start())

    def close(self) -> None:
        """Print the remaining output and stop."""
        for tail in self._tails:
            tail.stop()
        self._tails = []

    def _path(self, rank: int, name: str) -> Path:
        if self._folder is None:
            raise ValueError("no log directory was requested")
        folder = self._folder / f"{rank:05d}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{name}.log"


def _of(wanted: Std | Mapping[int, Std], rank: int) -> Std:
    return wanted.get(rank, Std.NONE) if isinstance(wanted, Mapping) else wanted


# The lighthouse of a live run (torchft), which forms the quorum of replicas at each step.
#
# There is one per job, in the supervisor of the first node. A lost replica is missed after ten
# heartbeats. An expected one is waited for much longer, since replicas that start without it would
# train a different history.

ADDRESS = "TORCHFT_LIGHTHOUSE"
LIVE = "DRIVETRAIN_LIVE"
_LOST_AFTER_MS = 1000
_JOIN_WITHIN_MS = 600_000


class Lighthouse:
    """A torchft lighthouse server in this process."""

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
        self._server.shutdown()


class SharedLighthouse:
    """The job's only lighthouse, whichever node runs it."""

    def __init__(self) -> None:
        self._own: Lighthouse | None = None

    def address(self, group: WorkerGroup) -> str:
        """Return its address: the first node starts it, the others read it from the store."""
        store: Any = group.store
        if group.group_rank == 0:
            self._own = self._own or Lighthouse(str(group.master_addr))
            store.set("lighthouse", self._own.address)
        return str(store.get("lighthouse").decode())

    def close(self) -> None:
        """Stop the server if it is this node's."""
        if self._own is not None:
            self._own.close()


# The environment of a rank, with torchrun's variables.


def rank_environment(group: WorkerGroup, local_rank: int, restart_count: int) -> dict[str, str]:
    """Return the variables of one rank, once the nodes have joined."""
    worker, spec = group.workers[local_rank], group.spec
    return {
        "LOCAL_RANK": str(local_rank),
        "RANK": str(worker.global_rank),
        "GROUP_RANK": str(group.group_rank),
        "ROLE_RANK": str(worker.role_rank),
        "ROLE_NAME": spec.role,
        "LOCAL_WORLD_SIZE": str(spec.local_world_size),
        "WORLD_SIZE": str(worker.world_size),
        "GROUP_WORLD_SIZE": str(group.group_world_size),
        "ROLE_WORLD_SIZE": str(worker.role_world_size),
        "MASTER_ADDR": str(group.master_addr),
        "MASTER_PORT": str(group.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(restart_count),
        "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
        "TORCHELASTIC_USE_AGENT_STORE": str(spec.rdzv_handler.use_agent_store),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.getenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }


class Starter:
    """Starts the ranks of one node."""

    def __init__(
        self, settings: Settings, node: Node, logs: Logs, head_start: HeadStart | None
    ) -> None:
        self._settings = settings
        self._node = node
        self._logs = logs
        self._head_start = head_start
        self._lighthouse = SharedLighthouse()
        self._command_s = os.environ.get(COMMAND_S) or str(time.time())

    def start(self, attempt: NodeAttempt) -> None:
        """Start the ranks; those with a head start are kept if their environment is right."""
        shared = self._of_all_ranks(attempt)
        workers = attempt.group.workers
        environments = [
            {
                **rank_environment(attempt.group, worker.local_rank, attempt.round),
                **shared,
                LAUNCHED_S: str(time.time()),
                "TORCHELASTIC_ERROR_FILE": str(attempt.error_file(worker.local_rank)),
                **self._logs.environment(worker.global_rank),
            }
            for worker in workers
        ]
        head_start, self._head_start = self._head_start, None
        if head_start is None or not head_start.has_told(environments):
            self._node.kill()
            self._node.start(environments)
        self._logs.follow([worker.global_rank for worker in workers])

    def close(self) -> None:
        """Close the logs and the lighthouse."""
        self._logs.close()
        self._lighthouse.close()

    def _of_all_ranks(self, attempt: NodeAttempt) -> dict[str, str]:
        shared = {
            COMMAND_S: self._command_s,
            "TORCHELASTIC_MAX_RESTARTS": str(self._settings.budgets.failures),
        }
        if self._settings.live:
            shared |= {ADDRESS: self._lighthouse.address(attempt.group), LIVE: "1"}
        return shared

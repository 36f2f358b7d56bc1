"""Starter: makes processes the ranks of an attempt, each with what it must know."""

from __future__ import annotations

import os
import time

from drivetrain.record.session import COMMAND_S, LAUNCHED_S
from drivetrain.supervise.attempt import Attempt
from drivetrain.supervise.lighthouse import ADDRESS, LIVE, SharedLighthouse
from drivetrain.supervise.logs import Logs
from drivetrain.supervise.processes.environment import rank_environment
from drivetrain.supervise.processes.head_start import HeadStart
from drivetrain.supervise.processes.node import Node
from drivetrain.supervise.settings import Settings


class Starter:
    """Of one node."""

    def __init__(
        self, settings: Settings, node: Node, logs: Logs, head_start: HeadStart | None
    ) -> None:
        self._settings = settings
        self._node = node
        self._logs = logs
        self._head_start = head_start
        self._lighthouse = SharedLighthouse()
        self._command_s = os.environ.get(COMMAND_S) or str(time.time())

    def start(self, attempt: Attempt) -> None:
        """Start its ranks; those that had a head start are kept, if they know what they should."""
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
        """What the ranks needed and the supervisor kept."""
        self._logs.close()
        self._lighthouse.close()

    def _of_all_ranks(self, attempt: Attempt) -> dict[str, str]:
        shared = {
            COMMAND_S: self._command_s,
            "TORCHELASTIC_MAX_RESTARTS": str(self._settings.budgets.failures),
        }
        if self._settings.live:
            shared |= {ADDRESS: self._lighthouse.address(attempt.group), LIVE: "1"}
        return shared

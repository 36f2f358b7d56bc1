"""Judge: Ray restarts workers; the judge ends the run when that could not help.

Ray only counts failures. After a config error, or when a step fails three times in a row, it would
restart the workers until the budget is used up. The judge runs in Ray's controller, sees each
failure before Ray decides, and ends the run by raising an exception, by the same rules as the
supervisor (supervise/policy.py).
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray.train import UserCallback

from drivetrain.core.errors import DrivetrainError
from drivetrain.launch.targets.ray.failures import as_rank_failure, end_of, in_words
from drivetrain.record.run_directory import RunDirectory
from drivetrain.supervise.failures.attempt_report import AttemptReport
from drivetrain.supervise.failures.failure import RankFailure
from drivetrain.supervise.policy import Budgets, End, EndKind, decide


class RunEnded(DrivetrainError):
    """The run is over, and restarting would not help."""


class Judge(UserCallback):  # type: ignore[misc, unused-ignore]  # Ray's own, when it is installed
    """Lives as long as Ray's controller, and remembers how earlier attempts ended."""

    def __init__(self, run_dir: str, max_failures: int) -> None:
        self._run_dir = run_dir
        self._budgets = Budgets(failures=max_failures)
        self._history: list[End] = []

    def after_exception(self, run_context: Any, worker_exceptions: Mapping[int, Exception]) -> None:  # noqa: ARG002
        """Raise if another attempt would fail again; Ray then ends the run."""
        failures = [as_rank_failure(rank, error) for rank, error in worker_exceptions.items()]
        end = end_of(failures, worker_exceptions.values())
        if end is None:  # a worker or its node is gone: only Ray's own budget applies
            self._write_down(End(EndKind.FAILED, 0, by_signal=True), failures, "")
            return
        decision = decide(end, self._history, self._budgets)
        self._history.append(end)
        self._write_down(end, failures, decision.why)
        if not decision.restart:
            text = in_words(failures)
            raise RunEnded(f"{text}\n\n{decision.why}" if decision.why else text)

    def _write_down(self, end: End, failures: list[RankFailure], why: str) -> None:
        """Record it in the attempt, where `auto` reads how often the run fails."""
        run = RunDirectory(Path(self._run_dir))
        attempts = run.attempts()
        if attempts and not attempts[-1].end:
            account = AttemptReport(end, failures, socket.gethostname(), "", why)
            with contextlib.suppress(OSError):
                run.end_attempt(attempts[-1].number, account.facts())

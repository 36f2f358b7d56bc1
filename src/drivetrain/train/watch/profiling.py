"""Profiling: torch's profiler for chosen steps of chosen ranks, enabled by the environment.

`drivetrain profile` requests it (ProfileRequest).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.profiler import profile, record_function, supported_activities

from drivetrain.record.requests import ProfileRequest
from drivetrain.train.hooks import Hook

if TYPE_CHECKING:
    from drivetrain.train.trainer import Trainer

_PY_SPY_PATIENCE_S = 20.0


class Profiling(Hook):
    """Records from the first chosen step to the last, on the chosen ranks."""

    def __init__(self) -> None:
        self._request = ProfileRequest.from_environment()
        self._profiler: profile | None = None
        self._step: Any = None
        self._sampler: subprocess.Popen[bytes] | None = None
        self._rank = 0

    def on_fit_start(self, trainer: Trainer) -> None:
        """Remember this rank's number."""
        self._rank = 0 if trainer.assembly is None else trainer.assembly.world.rank

    def on_train_batch_start(self, trainer: Trainer, step: int) -> None:  # noqa: ARG002
        """Begin recording if this step was chosen."""
        if not self._request.wants(self._rank, step):
            return
        if self._profiler is None:
            self._begin()
        self._step = record_function(f"step {step}")
        self._step.__enter__()

    def on_train_batch_end(self, trainer: Trainer, step: int) -> None:  # noqa: ARG002
        """Close the step and, after the last chosen one, the trace."""
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None
        if self._profiler is not None and not self._request.wants(self._rank, step + 1):
            self._end()

    def on_fit_end(self, trainer: Trainer) -> None:  # noqa: ARG002
        """Close the trace if the run ended before the last chosen step."""
        self._end()

    def _begin(self) -> None:
        if self._request.py_spy:
            self._sampler = _start_py_spy(self._request.flame_graph(self._rank))
        self._profiler = profile(activities=supported_activities(), record_shapes=True)
        self._profiler.start()

    def _end(self) -> None:
        if self._profiler is not None:
            self._profiler.stop()
            path = self._request.trace(self._rank)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._profiler.export_chrome_trace(str(path))
            self._profiler = None
        if self._sampler is not None:
            self._sampler.send_signal(signal.SIGINT)  # it then writes its flame graph
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._sampler.wait(_PY_SPY_PATIENCE_S)
            self._sampler = None


def _start_py_spy(path: Path) -> subprocess.Popen[bytes]:
    path.parent.mkdir(parents=True, exist_ok=True)
    program = Path(sys.executable).with_name("py-spy")
    argv = [
        "record",
        "--pid",
        str(os.getpid()),
        "--output",
        str(path),
        "--native",
        "--nonblocking",
    ]
    return subprocess.Popen(  # noqa: S603 - a fixed command
        [str(program), *argv], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )

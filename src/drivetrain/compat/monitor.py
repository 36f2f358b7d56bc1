"""PerformanceMonitor: named timers, and the timing of a few training steps."""

from __future__ import annotations

import logging
import statistics
import time
from typing import Any

import torch

from drivetrain.compat.pytorch import PyTorchDDPTrainer
from drivetrain.core.errors import ConfigError, Problem

_LOG = logging.getLogger("drivetrain")


class PerformanceMonitor:
    """Named timers that wait for the device's work to finish.

    Every run is recorded anyway: `drivetrain status`, `watch` and `profile` show more.
    """

    def __init__(self) -> None:
        self.timings: dict[str, float] = {}
        """Seconds of each timer that has ended, by name."""
        self._began_s: dict[str, float] = {}

    def start_timer(self, name: str) -> None:
        """Start or restart a timer."""
        _wait_for_device()
        self._began_s[name] = time.perf_counter()

    def end_timer(self, name: str) -> float:
        """Return the seconds since `start_timer`; also log them and keep them in `timings`."""
        _wait_for_device()
        if name not in self._began_s:
            rule, remedy = "was not started", f'start_timer("{name}") first'
            raise ConfigError([Problem("end_timer", rule, remedy, name)])
        seconds = time.perf_counter() - self._began_s.pop(name)
        self.timings[name] = seconds
        _LOG.info("%s: %.4f s", name, seconds)
        return seconds

    def monitor_training(self, trainer: Any, data_loader: Any, num_steps: int = 100) -> float:
        """Train for `num_steps` steps and return the seconds they took.

        A drop-in trainer's run is recorded: `drivetrain status RUN` shows where the time went.
        Any other object needs a method `train_step(data, target)`, which is timed step by step.
        """
        self.start_timer("total_training")
        if isinstance(trainer, PyTorchDDPTrainer):
            trainer.fit(data_loader, max_steps=num_steps)
        else:
            self._step_by_step(trainer, data_loader, num_steps)
        return self.end_timer("total_training")

    def _step_by_step(self, trainer: Any, data_loader: Any, num_steps: int) -> None:
        seconds = []
        for step, (data, target) in zip(range(num_steps), data_loader, strict=False):
            _wait_for_device()
            began_s = time.perf_counter()
            loss = trainer.train_step(data, target)
            _wait_for_device()
            seconds.append(time.perf_counter() - began_s)
            if step % 10 == 0:
                _LOG.info("step %d  loss %.4f", step, loss)
        if seconds:
            self.timings["forward_backward"] = statistics.median(seconds)
            _LOG.info("forward_backward: %.4f s (median)", self.timings["forward_backward"])


def _wait_for_device() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()

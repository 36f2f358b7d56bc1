"""One rank of `python -m benchmarks recording`: what writing everything down costs a step.

Four trainings in one process, in interleaved blocks: without a recorder (twice, one against the
other), with it, and with it and every sink there is. The sinks are the real ones: TensorBoard's
files, an MLflow store in SQLite, an endpoint for Prometheus, Weights & Biases offline. Beside the
clock's time each block's processor time is taken, which other work on the machine moves less.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from benchmarks.report import PROCESSOR
from benchmarks.steps.bitwise_worker import paced, prepared
from benchmarks.steps.interleaved import run_rank, timed_blocks
from benchmarks.steps.workloads import Workload, transformer
from drivetrain.record.recorder import Recorder
from drivetrain.record.step_file import StepTimes
from drivetrain.train.attempt import open_recorder

_LIBRARIES = {
    "tensorboard": "tensorboard",
    "mlflow": "mlflow",
    "prometheus": "prometheus_client",
    "wandb": "wandb",
}
_SETTLE_S = 20.0
"""Heavy libraries are imported by the sinks' threads; that is part of starting, not of a step."""
_STEPS_PER_BLOCK, _LOGGING_STEPS = 20, 10
"""Short, so that a machine whose pace changes changes it for all arms of a round."""
_EVENTS, _BLOCKS = 1000, 50


def all_sinks() -> tuple[str, ...]:
    """Those whose library is installed, and the one that needs none."""
    there = [name for name, library in _LIBRARIES.items() if importlib.util.find_spec(library)]
    return (*there, "jsonl")


def measure(num_rounds: int, beside: dict[str, list[float]]) -> dict[str, dict[str, list[float]]]:
    """Seconds per step of each arm, round by round; `beside`: of the threads beside that."""
    workload = transformer()
    torch.set_num_threads(1)  # or most of what is used beside the training would be the training's
    with tempfile.TemporaryDirectory() as folder:
        arms = {
            "off": Arm(workload, folder, None),
            "off again": Arm(workload, folder, None),
            "recorder": Arm(workload, folder, ()),
            "recorder and sinks": Arm(workload, folder, all_sinks()),
        }
        for arm in arms.values():
            arm(_LOGGING_STEPS)  # every sink has been opened
        time.sleep(_SETTLE_S)
        samples = timed_blocks(arms, _STEPS_PER_BLOCK, num_rounds)
        for arm in arms.values():
            arm.close()  # before the folder is gone
        name = f"ranks {dist.get_world_size()}, transformer"
        cpu = {each: arm.processor_s[-num_rounds:] for each, arm in arms.items()}
        beside.update({each: arm.beside_s[-num_rounds:] for each, arm in arms.items()})
        return {name: samples, name + PROCESSOR: cpu}


class Arm:
    """A training whose recorder works in its own blocks only: its threads' time is its own."""

    def __init__(self, workload: Workload, folder: str, sinks: tuple[str, ...] | None) -> None:
        """Without sinks (None) nothing is recorded, and nothing watched for it."""
        record = {
            "progress": "none",
            "sinks": list(sinks or ()),
            "logging_steps": _LOGGING_STEPS,
        }
        self._recorder = Recorder(None)
        self.processor_s: list[float] = []
        """Of each block, per step: all threads of this process, the sinks' too."""
        self.beside_s: list[float] = []
        """All threads but the one that trains: it can be held up by no more than what they use."""

        def open_one(*words: Any) -> Recorder:
            if sinks is not None:
                self._recorder = open_recorder(*words)
            return self._recorder

        loop = prepared(workload, 1, folder, record=record)
        if sinks is None:
            loop.assembly.engine.waiting.stop_watching()
        self._run = paced(loop, workload)
        with patch("drivetrain.train.attempt.open_recorder", open_one):
            self._run(1)

    def __call__(self, num_steps: int) -> None:
        """A block."""
        began_s, trained_s = time.process_time(), time.thread_time()
        self._recorder.hold(is_held=False)
        self._run(num_steps)
        self._recorder.hold(is_held=True)
        trained_s, used_s = time.thread_time() - trained_s, time.process_time() - began_s
        self.processor_s.append(used_s / num_steps)
        self.beside_s.append((used_s - trained_s) / num_steps)

    def close(self) -> None:
        """Let the sinks finish."""
        self._recorder.close()


def seconds_per_event() -> list[float]:
    """What handing over a step's times costs, in blocks."""
    times = StepTimes(1, 0.0, 0.1, 0.2, 0.3, 0.1, 0.0, 0.0)
    seconds = []
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        recorder = stack.enter_context(Recorder(Path(folder) / "events/00000.jsonl"))
        for _ in range(_BLOCKS):
            began_s = time.perf_counter()
            for _ in range(_EVENTS):
                recorder.step(times)
            seconds.append((time.perf_counter() - began_s) / _EVENTS)
            time.sleep(0.01)
    return seconds


def main() -> None:
    """Samples of steps, and of single events in a file beside them."""
    beside: dict[str, list[float]] = {}
    output = run_rank(lambda num_rounds: measure(num_rounds, beside))
    if output is not None:
        events = {
            "sinks": all_sinks(),
            "seconds_per_event": seconds_per_event(),
            "seconds_beside_per_step": beside,
        }
        (output.parent / "events.json").write_text(json.dumps(events) + "\n")


if __name__ == "__main__":
    main()

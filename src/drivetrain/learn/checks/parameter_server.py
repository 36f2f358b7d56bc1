"""A parameter server: which gradients a worker's parameters contain, and which workers wait.

Worker w's gradient is 1 at index w only, so the parameters count the gradients of each worker.
The last worker is slow, but not by time: it continues when the others are as far as they may be.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from drivetrain.learn.attempt import Outcome, Shortcoming, run_on_ranks
from drivetrain.learn.recording import PATIENCE_S
from drivetrain.learn.training import global_batch, new_model, on_one_process, weights_of
from drivetrain.learn.verdict import Passed, Score

_NUM_WORKERS = 3
_NUM_STEPS = 6
_RATE = 0.2
_GATE_S = 8.0
_LINGER_S = 0.7
"""Extra time in which a server that lets workers go too far shows it."""
_TRAINING = "a training, synchronous"


@dataclass(frozen=True)
class _Mode:
    name: str
    max_lead: float


_MODES = (
    _Mode("synchronous", 0),
    _Mode("at most 2 steps ahead", 2),
    _Mode("asynchronous", math.inf),
)


def check(file: Path) -> Passed:
    with tempfile.TemporaryDirectory(prefix="drivetrain-learn-") as folder:
        outcome = run_on_ranks(file, _all_modes, _NUM_WORKERS + 1, (folder,))
    for mode in _MODES:
        _judge_counts(outcome, mode)
    _judge_training(outcome)
    flow = outcome.flow(_MODES[0].name)
    size = 4 * _NUM_WORKERS
    return Passed(
        [
            f"{_NUM_WORKERS} workers, {_NUM_STEPS} steps: every gradient is applied once",
            "synchronous: in step t every worker has all gradients of the steps before",
            f"at most 2 steps ahead: the lead was {_largest_lead(outcome, _MODES[1])}, while one"
            " worker was slow; asynchronous: the others finished without it",
            "a training, synchronous: the parameters of one process",
        ],
        [
            Score(
                "bytes the server sends",
                flow.sent()[0],
                _NUM_WORKERS * _NUM_STEPS * size,
                "workers·steps·S",
            )
        ],
        flow.picture(),
    )


def _all_modes(module: Any, recorder: Any, folder: str) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for index, mode in enumerate(_MODES):
        recorder.section(mode.name)
        here = Path(folder) / str(index)
        here.mkdir(exist_ok=True)
        results[mode.name] = _count(module, mode, here)
        _meet(here)
    recorder.section(_TRAINING)
    results[_TRAINING] = _train(module)
    return results


def _count(module: Any, mode: _Mode, folder: Path) -> Any:
    rank = dist.get_rank()
    counts = torch.zeros(_NUM_WORKERS)
    if rank == 0:
        module.serve(counts, _NUM_STEPS, -float(_NUM_WORKERS), mode.max_lead)
        return counts.tolist()
    seen: list[list[float]] = []
    missed: list[str] = []

    def gradient_of(parameters: torch.Tensor, step: int) -> torch.Tensor:
        seen.append(parameters.tolist())
        (folder / f"{rank}-{step}").touch()
        if rank == _NUM_WORKERS and step == 0 and mode.max_lead > 0:
            furthest = int(min(mode.max_lead, _NUM_STEPS - 1))
            missed.extend(_wait_for_others(folder, furthest))
        return nn.functional.one_hot(torch.tensor(rank - 1), _NUM_WORKERS).float()

    module.work(gradient_of, counts, _NUM_STEPS)
    return seen, missed


def _meet(folder: Path) -> None:
    """Wait for all ranks, so that an extra message is detected here and not received later."""
    (folder / f"{dist.get_rank()}-end").touch()
    deadline_s = time.monotonic() + PATIENCE_S + 2
    while len(list(folder.glob("*-end"))) <= _NUM_WORKERS and time.monotonic() < deadline_s:
        time.sleep(0.01)


def _wait_for_others(folder: Path, step: int) -> list[str]:
    """Wait until the others have begun this step; return those that have not."""
    due = {worker: folder / f"{worker}-{step}" for worker in range(1, _NUM_WORKERS)}
    deadline_s = time.monotonic() + _GATE_S
    while time.monotonic() < deadline_s and not all(each.exists() for each in due.values()):
        time.sleep(0.01)
    time.sleep(_LINGER_S)
    return [
        f"worker {worker} never began step {step}"
        for worker, file in due.items()
        if not file.exists()
    ]


def _judge_counts(outcome: Outcome, mode: _Mode) -> None:
    shown = {"where": mode.name, "picture": outcome.flow(mode.name).picture()}
    for judge in (_judge_own, _judge_staleness):
        for worker in range(1, _NUM_WORKERS + 1):
            seen, _ = outcome.results[worker][mode.name]
            for step, counts in enumerate(seen):
                judge(counts, worker, step, mode, shown)
    _, missed = outcome.results[_NUM_WORKERS][mode.name]
    if missed:
        raise Shortcoming(
            "waits-needlessly",
            f"while worker {_NUM_WORKERS} is in its first step, the others may be"
            f" {min(mode.max_lead, _NUM_STEPS - 1):g} steps ahead",
            "\n".join(missed),
            **shown,
        )
    applied = outcome.results[0][mode.name]
    if applied != [_NUM_STEPS] * _NUM_WORKERS:
        raise Shortcoming(
            "lost-update",
            f"at the end the server has applied {_NUM_STEPS} gradients of each worker",
            f"{applied} of workers 1 to {_NUM_WORKERS}",
            **shown,
        )


def _judge_own(
    counts: list[float], worker: int, step: int, _: _Mode, shown: dict[str, str]
) -> None:
    own = counts[worker - 1]
    if any(count != int(count) for count in counts) or own > step:
        expected = "each gradient applied once, divided by the number of workers"
        raise _applied("wrong-update", expected, counts, worker, step, shown)
    if own < step:
        expected = f"the worker's own {step} gradients are among them"
        raise _applied("own-missing", expected, counts, worker, step, shown)


def _judge_staleness(
    counts: list[float], worker: int, step: int, mode: _Mode, shown: dict[str, str]
) -> None:
    if step - min(counts) > mode.max_lead:
        expected = f"at least {step - mode.max_lead:g} gradients of each worker"
        raise _applied("too-stale", expected, counts, worker, step, shown)


def _applied(
    hint: str, expected: str, counts: list[float], worker: int, step: int, shown: dict[str, str]
) -> Shortcoming:
    found = (
        f"worker {worker} in step {step}: gradients of workers 1 to {_NUM_WORKERS} in"
        f" its parameters: {[round(count, 3) for count in counts]}"
    )
    return Shortcoming(hint, expected, found, **shown)


def _largest_lead(outcome: Outcome, mode: _Mode) -> int:
    return max(
        int(step - min(counts))
        for worker in range(1, _NUM_WORKERS + 1)
        for step, counts in enumerate(outcome.results[worker][mode.name][0])
    )


def _train(module: Any) -> list[float]:
    model = new_model()
    flat = torch.tensor(weights_of(model))
    rank = dist.get_rank()
    if rank == 0:
        module.serve(flat, _NUM_STEPS, _RATE, 0)
        return flat.tolist()
    module.work(_gradient_function(model, rank - 1), flat, _NUM_STEPS)
    return []


def _gradient_function(
    model: nn.Module, worker: int
) -> Callable[[torch.Tensor, int], torch.Tensor]:
    def gradient_of(parameters: torch.Tensor, step: int) -> torch.Tensor:
        nn.utils.vector_to_parameters(parameters.clone(), model.parameters())
        model.zero_grad()
        inputs, classes = (part[worker::_NUM_WORKERS] for part in global_batch(step + 1))
        nn.functional.cross_entropy(model(inputs), classes).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    return gradient_of


def _judge_training(outcome: Outcome) -> None:
    _, model = on_one_process(
        _NUM_STEPS, optimizer_of=lambda m: torch.optim.SGD(m.parameters(), lr=_RATE)
    )
    right, found = torch.tensor(weights_of(model)), torch.tensor(outcome.results[0][_TRAINING])
    off = float((found - right).norm() / right.norm())
    if not off < 1e-4:
        raise Shortcoming(
            "wrong-update",
            f"after {_NUM_STEPS} synchronous steps, the parameters of one process",
            f"the parameters are off by {off:.2%}",
            where=_TRAINING,
        )

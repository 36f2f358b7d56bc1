"""Exact resume: the same losses, bit for bit, after an interruption and on other numbers of ranks.

The check's own part of the training adds gradients by micro-batch in a fixed order, so that the
number of ranks changes no bit; only what the learner writes can differ.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from drivetrain.learn.attempt import Shortcoming, in_this_process, run_on_ranks
from drivetrain.learn.exact import NUM_MICRO, NUM_SAMPLES, SEED, SIZE, ExactJob
from drivetrain.learn.verdict import Passed

_NUM_STEPS, _CAPTURED_AT = 12, 5
_PER_STEP = SIZE * NUM_MICRO


def check(file: Path) -> Passed:
    in_this_process(file, _judge_data)
    in_this_process(file, _judge_generators)
    with tempfile.TemporaryDirectory(prefix="drivetrain-learn-") as folder:
        state = str(Path(folder) / "state.pt")
        whole = run_on_ranks(file, _train, 2, ("", state)).results[0]
        alone = run_on_ranks(file, _train, 1).results[0]
        _judge_losses(whole.losses, alone.losses, "depends-on-ranks", "12 steps on 1 rank, not 2")
        for num_ranks in (2, 1, 3):
            where = f"resumed on {num_ranks} ranks after step {_CAPTURED_AT}"
            for resumed in run_on_ranks(file, _train, num_ranks, (state,)).results:
                _judge_restored(whole, resumed, where)
                _judge_losses(whole.losses[_CAPTURED_AT:], resumed.losses, "parted", where)
    return Passed(
        [
            "3 epochs of 50 samples: each sample once per epoch, in a different order each time",
            f"{_NUM_STEPS} steps on 2 ranks: the same losses on 1, bit for bit",
            f"saved on 2 ranks after step {_CAPTURED_AT}, resumed on 2, 1 and 3: the same losses,"
            " bit for bit",
        ]
    )


def _judge_data(module: ModuleType) -> None:
    ids: list[int] = []
    for step in range(3 * NUM_SAMPLES // _PER_STEP + 1):
        for micro_batch in range(NUM_MICRO):
            own = module.micro_batch_ids(SEED, NUM_SAMPLES, SIZE, step, micro_batch, NUM_MICRO)
            if len(own) != SIZE:
                raise Shortcoming(
                    "epoch-not-covered",
                    f"{SIZE} samples in every micro-batch, even where an epoch ends",
                    f"{len(own)} in micro-batch {micro_batch} of step {step}",
                )
            ids += [int(i) for i in own]
    epochs = [ids[e * NUM_SAMPLES : (e + 1) * NUM_SAMPLES] for e in range(3)]
    for epoch, seen in enumerate(epochs):
        missing = sorted(set(range(NUM_SAMPLES)) - set(seen))
        if missing:
            raise Shortcoming(
                "epoch-not-covered",
                f"epoch {epoch}: each of the samples 0 to {NUM_SAMPLES - 1} once",
                f"{len(missing)} are never read, the first is {missing[0]}",
            )
    if epochs[0] == epochs[1] or epochs[0] == sorted(epochs[0]):
        raise Shortcoming(
            "same-every-epoch", "a different order in each epoch", "epochs 0 and 1 are the same"
        )


def _judge_generators(module: ModuleType) -> None:
    def drawn(step: int, micro_batch: int) -> list[float]:
        generator = module.generator_of(SEED, step, micro_batch)
        numbers: list[float] = torch.rand(4, generator=generator).tolist()
        return numbers

    places = [(step, micro_batch) for step in range(6) for micro_batch in range(NUM_MICRO)]
    first = {place: drawn(*place) for place in places}
    if any(drawn(*place) != numbers for place, numbers in first.items()):
        raise Shortcoming(
            "not-repeatable",
            "the same arguments give a generator with the same numbers",
            "different numbers when asked again",
        )
    seen: dict[tuple[float, ...], tuple[int, int]] = {}
    for place, numbers in first.items():
        other = seen.setdefault(tuple(numbers), place)
        if other != place:
            raise Shortcoming(
                "same-dropout",
                "different numbers for each micro-batch of each step",
                f"step {place[0]}, micro-batch {place[1]} has those of step {other[0]},"
                f" micro-batch {other[1]}",
            )


@dataclass(frozen=True)
class _State:
    """A job's state, for comparison."""

    step: int
    weights: list[float]
    moments: list[float]
    rate: float
    scheduler_steps: int


@dataclass(frozen=True)
class _Trained:
    at_begin: _State
    when_captured: _State | None
    at_end: _State
    losses: list[float]


def _state_of(job: ExactJob) -> _State:
    moments = [
        float(value)
        for group in job.optimizer.state.values()
        for moment in group.values()
        for value in torch.as_tensor(moment).flatten()
    ]
    rate = float(job.optimizer.param_groups[0]["lr"])
    return _State(int(job.step), job.weights, moments, rate, int(job.scheduler.last_epoch))


def _train(module: Any, recorder: Any, resume_from: str = "", save_to: str = "") -> _Trained:
    torch.manual_seed(dist.get_rank())  # useless on another rank
    job = ExactJob()
    if resume_from:
        module.restore(job, torch.load(resume_from, weights_only=True))
    begin, captured, kept = _state_of(job), None, None
    losses = []
    while job.step < _NUM_STEPS:
        if save_to and job.step == _CAPTURED_AT:
            captured, kept = _state_of(job), module.capture(job)
        with recorder.paused():
            losses.append(_one_step(module, job))
    if save_to and dist.get_rank() == 0:
        torch.save(kept, save_to)  # late, as if it were written in the background
    return _Trained(begin, captured, _state_of(job), losses)


def _one_step(module: Any, job: ExactJob) -> float:
    """Step with one row of gradients per micro-batch, whichever rank computed it."""
    rows = torch.zeros(NUM_MICRO, job.row_length)
    for micro_batch in range(dist.get_rank(), NUM_MICRO, dist.get_world_size()):
        rows[micro_batch] = job.row(module, micro_batch)
    dist.all_reduce(rows)
    return job.apply(rows)


def _judge_restored(whole: _Trained, resumed: _Trained, where: str) -> None:
    right, found = whole.when_captured, resumed.at_begin
    if right is None:
        raise Shortcoming(
            "parted", "job.step counts the steps that are done", f"it never was {_CAPTURED_AT}"
        )
    if found.weights == whole.at_end.weights:
        said = f"those of step {whole.at_end.step}"
        raise Shortcoming("not-a-copy", f"weights of step {right.step}", said, where=where)
    for what, hint, due, here in (
        ("job.step", "step-off", right.step, found.step),
        ("weights", "weights-lost", right.weights, found.weights),
        ("optimizer moments", "optimizer-lost", right.moments, found.moments),
        ("learning rate", "rate-lost", right.rate, found.rate),
        ("scheduler steps", "rate-lost", right.scheduler_steps, found.scheduler_steps),
    ):
        if due != here:
            expected = f"{what} as captured: {_brief(due)}"
            raise Shortcoming(hint, expected, _brief(here), where=where)


def _brief(value: Any) -> str:
    if isinstance(value, list):
        shown = ", ".join(f"{v:.4g}" for v in value[:3])
        return f"{len(value)} numbers: {shown} …" if value else "none"
    return f"{value:g}"


def _judge_losses(right: Sequence[float], found: Sequence[float], hint: str, where: str) -> None:
    for index, (due, here) in enumerate(zip(right, found, strict=False)):
        if due != here:
            number = len(right) - len(found) + index
            raise Shortcoming(
                hint,
                f"loss {due:.9f} in step {number + 1} of these, as without interruption",
                f"{here:.9f}",
                where=where,
            )
    if len(right) != len(found):
        raise Shortcoming(hint, f"{len(right)} steps", f"{len(found)}", where=where)

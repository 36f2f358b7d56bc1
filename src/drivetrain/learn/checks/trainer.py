"""Gradient averaging: the numbers of one process, on ranks with different numbers of tokens."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from drivetrain.learn.attempt import Outcome, Shortcoming, run_on_ranks
from drivetrain.learn.training import (
    NUM_STEPS,
    gradient_norm,
    largest_difference,
    new_model,
    new_optimizer,
    on_one_process,
    require_same_training,
    samples,
    weights_of,
)
from drivetrain.learn.verdict import Passed, Score
from drivetrain.verify.parity.compare import StepNumbers, relative

_NUM_RANKS = 3
_EQUAL = (8, 8, 8)
_UNEQUAL = (3, 17, 4)
_WITH_EMPTY = (0, 20, 4)


def check(file: Path) -> Passed:
    for name, tokens in (
        ("the same number of tokens on every rank", _EQUAL),
        (f"{_listed(_UNEQUAL)} tokens on ranks 0, 1, 2", _UNEQUAL),
        (f"{_listed(_WITH_EMPTY)} tokens on ranks 0, 1, 2", _WITH_EMPTY),
    ):
        try:
            outcome = run_on_ranks(file, _train, _NUM_RANKS, (tokens,))
        except Shortcoming as found:
            found.where = f"{found.where}; {name}" if found.where else ""
            raise
        _judge(outcome, tokens, name)
    sent, least = max(outcome.flow("step 1").sent()), _least_bytes()
    return Passed(
        [
            f"{NUM_STEPS} losses and gradient norms on {_NUM_RANKS} ranks as on one process, with"
            " equal and unequal numbers of tokens, and with a rank that has none",
            "the copies of the model stay equal, bit for bit",
        ],
        [Score("bytes a rank sends a step", sent, least, "2(n−1)/n·(gradients + a count)")],
        outcome.flow("step 1").picture(),
    )


def _listed(tokens: tuple[int, ...]) -> str:
    return ", ".join(map(str, tokens))


def _least_bytes() -> float:
    size = sum(p.numel() * p.element_size() for p in new_model().parameters())
    return 2 * (_NUM_RANKS - 1) / _NUM_RANKS * (size + 4)


def _batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    return samples(24, seed=500 + step)


def _train(module: Any, recorder: Any, tokens: tuple[int, ...]) -> Any:
    rank = dist.get_rank()
    begin = sum(tokens[:rank])
    model = new_model()
    optimizer = new_optimizer(model)
    numbers, losses = {}, {}
    for step in range(1, NUM_STEPS + 1):
        inputs, classes = (part[begin : begin + tokens[rank]] for part in _batch(step))
        optimizer.zero_grad()
        recorder.section(f"step {step}")
        reported = module.backward_and_average(model, inputs, classes)
        losses[step] = float(torch.as_tensor(reported).detach())
        loss = nn.functional.cross_entropy(model(inputs), classes, reduction="sum").detach()
        numbers[step] = StepNumbers(float(loss) / sum(tokens), gradient_norm(model))
        optimizer.step()
    return numbers, losses, weights_of(model)


def _judge(outcome: Outcome, tokens: tuple[int, ...], where: str) -> None:
    reference, _ = on_one_process(batch_of=_batch)
    picture = outcome.flow("step 1").picture()
    first = [result[0][1].gradient_norm for result in outcome.results]
    right = reference[1].gradient_norm or math.nan
    shown = {"where": where, "picture": picture}
    if len({round(norm, 9) for norm in first}) > 1:
        raise Shortcoming(
            "ranks-differ",
            "after averaging, every rank has the same gradient",
            "gradient norms of step 1: "
            + ", ".join(f"rank {rank} {norm:.4f}" for rank, norm in enumerate(first)),
            **shown,
        )
    if relative(first[0], right) > 1e-3:
        hint = _which_mean(first[0], right, tokens)
        raise Shortcoming(
            hint,
            f"step 1: gradient norm {right:.5f}, of the mean over all {sum(tokens)} tokens",
            f"{first[0]:.5f}, {first[0] / right:.4g} times as much",
            **shown,
        )
    mean = {s: sum(result[0][s].loss for result in outcome.results) for s in reference}
    for own, _, weights in outcome.results:
        numbers = {s: own[s]._replace(loss=loss) for s, loss in mean.items()}
        require_same_training(reference, numbers, "drifted", **shown)
        if largest_difference(weights, outcome.results[0][2]) > 0:
            raise Shortcoming(
                "drifted", "equal copies of the model", "the ranks' weights differ", **shown
            )
    for rank, (_, losses, _) in enumerate(outcome.results):
        for step, loss in losses.items():
            if not relative(loss, reference[step].loss) < 1e-3:
                raise Shortcoming(
                    "local-loss",
                    f"every rank returns the mean loss of step {step} over all tokens,"
                    f" {reference[step].loss:.5f}",
                    f"rank {rank} returned {loss:.5f}",
                    **shown,
                )


def _which_mean(found: float, right: float, tokens: tuple[int, ...]) -> str:
    if abs(found / right - len(tokens)) < 0.01:
        return "not-divided"
    if abs(found / right * len(tokens) - 1) < 0.01:
        return "divided-twice"
    if abs(found / right / sum(tokens) - 1) < 0.01:
        return "sum-not-mean"
    return "mean-of-means" if len(set(tokens)) > 1 else "wrong-gradient"

"""Gradient accumulation: the numbers of one process, one reduction, one micro-batch in memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from drivetrain.core.text import readable_bytes
from drivetrain.learn.attempt import Outcome, Shortcoming, run_on_ranks
from drivetrain.learn.memory import SavedBytes
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

_SLACK = 1.5
Layout = tuple[tuple[int, ...], ...]
"""Tokens of each micro-batch, by rank; 24 in all."""
_EQUAL: Layout = ((3, 3, 3, 3), (3, 3, 3, 3))
_UNEQUAL: Layout = ((1, 6, 2), (8, 3, 4))
_UNEVEN: Layout = ((5, 2, 4, 6), (7,))
_CASES = {
    "micro-batches of 3 tokens, 4 on each rank": _EQUAL,
    f"micro-batches of {_UNEQUAL[0]} and {_UNEQUAL[1]} tokens on ranks 0 and 1": _UNEQUAL,
    f"{len(_UNEVEN[0])} micro-batches on rank 0, {len(_UNEVEN[1])} on rank 1": _UNEVEN,
}


def check(file: Path) -> Passed:
    scores = []
    for where, layout in _CASES.items():
        outcome = run_on_ranks(file, _train, len(layout), (layout,))
        _judge(outcome, layout, where)
        scores = _judge_cost(outcome, layout, where)
    return Passed(
        [
            f"{NUM_STEPS} losses and gradient norms on 2 ranks as on one process, with equal and"
            " unequal micro-batches, and with 4 of them on one rank and 1 on the other",
            "the copies of the model stay equal, bit for bit",
        ],
        scores,
        outcome.flow("step 1").picture(),
    )


def _batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    return samples(24, seed=700 + step)


def _micro_batches(step: int, layout: Layout, rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    inputs, classes = _batch(step)
    begin = sum(sum(tokens) for tokens in layout[:rank])
    own = slice(begin, begin + sum(layout[rank]))
    pieces = (part[own].split(list(layout[rank])) for part in (inputs, classes))
    return list(zip(*pieces, strict=True))


def _train(module: Any, recorder: Any, layout: Layout) -> Any:
    rank = dist.get_rank()
    model = new_model()
    optimizer = new_optimizer(model)
    numbers, losses = {}, {}
    saved = SavedBytes(model.parameters())
    for step in range(1, NUM_STEPS + 1):
        micro_batches = _micro_batches(step, layout, rank)
        optimizer.zero_grad()
        recorder.section(f"step {step}")
        with torch.no_grad():
            before = sum(float(_loss_sum(model, batch)) for batch in micro_batches)
        with saved.counting():
            reported = module.accumulate(model, micro_batches)
        losses[step] = float(torch.as_tensor(reported).detach())
        numbers[step] = StepNumbers(before / 24, gradient_norm(model))
        optimizer.step()
    return numbers, losses, weights_of(model), saved.peak


def _loss_sum(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def _judge(outcome: Outcome, layout: Layout, where: str) -> None:
    reference, _ = on_one_process(batch_of=_batch)
    shown = {"where": where, "picture": outcome.flow("step 1").picture()}
    first = [result[0][1].gradient_norm for result in outcome.results]
    right = reference[1].gradient_norm or 0.0
    if relative(first[0], right) > 1e-3 or relative(first[1], right) > 1e-3:
        raise Shortcoming(
            _which_mistake(first, layout),
            f"step 1: gradient norm {right:.5f} on both ranks, of the mean over all 24 tokens",
            ", ".join(f"rank {rank} {norm:.5f}" for rank, norm in enumerate(first)),
            **shown,
        )
    mean = {s: sum(result[0][s].loss for result in outcome.results) for s in reference}
    for rank, (own, losses, weights, _) in enumerate(outcome.results):
        numbers = {s: own[s]._replace(loss=loss) for s, loss in mean.items()}
        require_same_training(reference, numbers, "drifted", **shown)
        if largest_difference(weights, outcome.results[0][2]) > 0:
            raise Shortcoming(
                "drifted", "equal copies of the model", "the ranks' weights differ", **shown
            )
        wrong = [s for s, loss in losses.items() if not relative(loss, reference[s].loss) < 1e-3]
        if wrong:
            raise Shortcoming(
                "local-loss",
                f"every rank returns the mean loss of step {wrong[0]} over all tokens,"
                f" {reference[wrong[0]].loss:.5f}",
                f"rank {rank} returned {losses[wrong[0]]:.5f}",
                **shown,
            )


def _which_mistake(found: Sequence[float], layout: Layout) -> str:
    """Return the hint for the mistake that would give these gradient norms."""
    for hint, norms in _mistakes(layout):
        if all(relative(here, norm) < 1e-3 for here, norm in zip(found, norms, strict=True)):
            return hint
    return "ranks-differ" if relative(found[0], found[1]) > 1e-3 else "wrong-gradient"


def _mistakes(layout: Layout) -> list[tuple[str, list[float]]]:
    """Return the gradient norms, by rank, of the most frequent mistakes."""
    by_rank = [
        [_mean_gradient(batch) for batch in _micro_batches(1, layout, rank)]
        for rank in range(len(layout))
    ]
    weighted = [
        [g * tokens / 24 for g, tokens in zip(own, layout[rank], strict=True)]
        for rank, own in enumerate(by_rank)
    ]
    num_ranks = len(layout)
    means = [sum(own) / len(own) for own in by_rank]
    found = [
        ("not-divided", sum(sum(own) for own in by_rank)),
        ("not-divided", sum(sum(own) for own in by_rank) / num_ranks),
        ("not-divided", sum(sum(own) for own in weighted) * 24),
        ("not-divided", sum(means)),
        ("mean-of-means", sum(means) / num_ranks),
        ("mean-of-means", sum(sum(w) / sum(layout[r]) for r, w in enumerate(weighted)) * 12),
        ("overwritten", sum(own[-1] for own in weighted)),
        ("overwritten", _last_only(weighted, layout)),
        ("overwritten", sum(own[-1] for own in by_rank) / num_ranks),
        ("counted-again", _reduced_again(weighted)),
        ("counted-again", _reduced_again(by_rank) / num_ranks),
    ]
    return [(hint, [float(torch.as_tensor(each).norm())] * num_ranks) for hint, each in found]


def _last_only(weighted: list[list[torch.Tensor]], layout: Layout) -> torch.Tensor:
    return sum((own[-1] for own in weighted), torch.zeros(())) * 24 / sum(t[-1] for t in layout)


def _reduced_again(gradients: list[list[torch.Tensor]]) -> torch.Tensor:
    """Return the gradient if the accumulated sum is reduced after every micro-batch."""
    total = torch.zeros(())
    for pieces in zip(*gradients, strict=False):
        total = total * len(gradients) + sum(pieces)
    return total


def _mean_gradient(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    model = new_model()
    nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def _judge_cost(outcome: Outcome, layout: Layout, where: str) -> list[Score]:
    flow = outcome.flow("step 1")
    sent, least_sent = max(flow.sent()), _least_bytes(len(layout))
    if sent > _SLACK * least_sent:
        raise Shortcoming(
            "too-many-bytes",
            f"gradients are reduced once a step: a rank sends about {readable_bytes(least_sent)}",
            f"{readable_bytes(sent)}, {sent / least_sent:.2g} times as much",
            where=where,
            picture=flow.picture(),
        )
    peaks = [result[3] for result in outcome.results]
    busiest = max(range(len(layout)), key=lambda rank: peaks[rank] / _least_saved(layout, rank))
    least_saved = _least_saved(layout, busiest)
    if peaks[busiest] > _SLACK * least_saved:
        raise Shortcoming(
            "all-at-once",
            "activations of one micro-batch at a time: at most"
            f" {readable_bytes(least_saved)} saved for backward",
            f"{readable_bytes(peaks[busiest])} on rank {busiest}",
            where=where,
        )
    return [
        Score("bytes a rank sends a step", sent, least_sent, "2(n−1)/n·(gradients + a count)"),
        Score(
            "activations held at a time", peaks[busiest], least_saved, "the largest micro-batch's"
        ),
    ]


def _least_bytes(num_ranks: int) -> float:
    size = sum(p.numel() * p.element_size() for p in new_model().parameters())
    return 2 * (num_ranks - 1) / num_ranks * (size + 4)


def _least_saved(layout: Layout, rank: int) -> int:
    """Return the bytes saved for backward by a rank's largest micro-batch."""
    model = new_model()
    saved = SavedBytes(model.parameters())
    largest = max(_micro_batches(1, layout, rank), key=lambda batch: len(batch[1]))
    with saved.counting():
        _loss_sum(model, largest).backward()
    return saved.peak

"""Sharded parameters: the steps of one process, two whole layers at a time, and a prefetch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from drivetrain.core.text import readable_bytes
from drivetrain.learn.allocations import Allocations, allocations, held_bytes
from drivetrain.learn.attempt import Outcome, Shortcoming, run_on_ranks
from drivetrain.learn.flow import RankLog
from drivetrain.learn.shards import Move, judge_move
from drivetrain.learn.training import require_same_training
from drivetrain.learn.verdict import Passed, Score
from drivetrain.verify.parity.compare import StepNumbers

_NUM_RANKS = 3
_NUM_STEPS = 5
_NUM_LAYERS = 12
_WIDTH = 49  # 2450 parameters a layer, not divisible by 3
_CLASSES = 5
_ROWS = 2  # few: the check is about parameters, not activations
_RATE = 0.5
_SLACK = 1.05
_LAYER_BYTES = 4 * (_WIDTH * _WIDTH + _WIDTH)
_INPUTS_BYTES = 4 * _WIDTH * _ROWS * _NUM_LAYERS
_MOST_IN_BACKWARD = 10
"""Layers: 4 for the shards' gradients, 2 whole, and the rest for one gradient being reduced."""


def check(file: Path) -> Passed:
    outcome = run_on_ranks(file, _train, _NUM_RANKS)
    judge_move(_move_of_first_step(outcome), outcome.flow(_section("forward", 1)).picture())
    _judge_losses(outcome)
    _judge_held(outcome)
    forward, backward = _judge_peaks(outcome)
    waited = _judge_prefetch(outcome)
    sent, limit = _judge_bytes(outcome)
    two = 2 * _LAYER_BYTES + _INPUTS_BYTES
    return Passed(
        [
            f"{_NUM_STEPS} losses on {_NUM_RANKS} ranks as on one process; each rank keeps"
            f" 1/{_NUM_RANKS} of {_NUM_LAYERS} layers",
            f"allocated at most {forward / _LAYER_BYTES:.1f} layers in forward and"
            f" {backward / _LAYER_BYTES:.1f} in backward, gradients and activations included",
        ],
        [
            Score("peak of forward", forward, two, "two layers + every layer's inputs"),
            Score("layers waited for", waited, 2, "the first of forward and backward", "layers"),
            Score("bytes a rank sends a step", sent, limit, "3(n−1)/n·S"),
        ],
        outcome.flow(_section("forward", 1)).picture(),
    )


class _Layer:
    """A layer as passed to learners; it marks when it is computed."""

    num_parameters = _WIDTH * _WIDTH + _WIDTH

    def __init__(self, index: int, recorder: Any = None) -> None:
        self._index = index
        self._recorder = recorder

    def initial(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self._index)
        return torch.randn(self.num_parameters, generator=generator).mul(_WIDTH**-0.5)

    def compute(self, parameters: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        if self._recorder is not None:
            self._recorder.mark(_mark(self._index))
        weight, bias = parameters.split([_WIDTH * _WIDTH, _WIDTH])
        outputs: torch.Tensor = nn.functional.linear(inputs, weight.view(_WIDTH, _WIDTH), bias)
        return outputs if self._index == _NUM_LAYERS - 1 else torch.tanh(outputs)


def _mark(layer: int) -> str:
    return f"layer {layer} is computed"


def _section(what: str, step: int) -> str:
    return f"{what} of step {step}"


def _batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(_ROWS, _WIDTH, generator=generator)
    return inputs, torch.randint(_CLASSES, (_ROWS,), generator=generator)


def _train(module: Any, recorder: Any) -> dict[str, Any]:
    rank = dist.get_rank()
    model = module.ShardedLayers([_Layer(index, recorder) for index in range(_NUM_LAYERS)])
    optimizer = torch.optim.SGD(model.shards, lr=_RATE)
    held = held_bytes(model)
    losses, weights, peaks = {}, [], {}
    for step in range(1, _NUM_STEPS + 1):
        inputs, classes = _batch(step, rank)
        optimizer.zero_grad()
        recorder.section(_section("forward", step))
        kept: list[torch.Tensor] = []
        peaks["forward", step] = allocations(partial(_forward, model, inputs, kept))
        outputs = kept.pop().detach().requires_grad_()
        loss = nn.functional.cross_entropy(outputs, classes)
        (gradient,) = torch.autograd.grad(loss, outputs)
        recorder.section(_section("backward", step))
        peaks["backward", step] = allocations(partial(model.backward, gradient))
        optimizer.step()
        losses[step] = float(loss.detach())
        with recorder.paused():
            weights.append(_gathered(model.shards))
    return {
        "losses": losses,
        "weights": weights,
        "held": held,
        "lengths": [len(shard) for shard in model.shards],
        "peaks": peaks,
    }


def _forward(model: Any, inputs: torch.Tensor, kept: list[torch.Tensor]) -> None:
    kept.append(model.forward(inputs))


def _gathered(shards: Sequence[torch.Tensor]) -> list[float]:
    """Return all whole layers, concatenated."""
    layers = []
    for shard in shards:
        pieces = [torch.empty(0)] * dist.get_world_size()
        dist.all_gather_object(pieces, shard.detach())
        layers.append(torch.cat(pieces)[: _Layer.num_parameters])
    together: list[float] = torch.cat(layers).tolist()
    return together


def _on_one_process(num_steps: int, ranks: Sequence[int]) -> tuple[dict[int, float], torch.Tensor]:
    """Return losses and final parameters for the mean over these ranks' batches."""
    layers = [_Layer(index) for index in range(_NUM_LAYERS)]
    parameters = [layer.initial().requires_grad_() for layer in layers]
    optimizer = torch.optim.SGD(parameters, lr=_RATE)
    losses = {}
    for step in range(1, num_steps + 1):
        optimizer.zero_grad()
        batches = [_batch(step, rank) for rank in ranks]
        values = torch.cat([inputs for inputs, _ in batches])
        for layer, own in zip(layers, parameters, strict=True):
            values = layer.compute(own, values)
        loss = nn.functional.cross_entropy(values, torch.cat([classes for _, classes in batches]))
        loss.backward()
        losses[step] = float(loss.detach())
        optimizer.step()
    return losses, torch.cat([own.detach() for own in parameters])


def _move_of_first_step(outcome: Outcome) -> Move:
    before = torch.cat([_Layer(index).initial() for index in range(_NUM_LAYERS)])
    _, right = _on_one_process(1, range(_NUM_RANKS))
    for rank, result in enumerate(outcome.results):
        expected = -(-_Layer.num_parameters // _NUM_RANKS)
        if max(result["lengths"]) > expected or len(result["lengths"]) != _NUM_LAYERS:
            raise Shortcoming(
                "not-sharded",
                f"{_NUM_LAYERS} shards of ⌈{_Layer.num_parameters}/{_NUM_RANKS}⌉ = {expected}"
                " elements",
                f"rank {rank} has {len(result['lengths'])}, of {max(result['lengths'])} elements",
            )
    return Move(
        right=right - before,
        found=[torch.tensor(result["weights"][0]) - before for result in outcome.results],
        alone=[_on_one_process(1, [rank])[1] - before for rank in range(_NUM_RANKS)],
        part_of=_Layer.num_parameters,
    )


def _judge_losses(outcome: Outcome) -> None:
    losses, _ = _on_one_process(_NUM_STEPS, range(_NUM_RANKS))
    reference = {step: StepNumbers(loss, None) for step, loss in losses.items()}
    found = {
        step: StepNumbers(sum(r["losses"][step] for r in outcome.results) / _NUM_RANKS, None)
        for step in reference
    }
    require_same_training(reference, found, "later-step")


def _judge_held(outcome: Outcome) -> None:
    part = _LAYER_BYTES * _NUM_LAYERS / _NUM_RANKS
    held = max(result["held"] for result in outcome.results)
    if held > part * 1.2:
        raise Shortcoming(
            "keeps-whole",
            f"a rank keeps 1/{_NUM_RANKS} of the parameters, {readable_bytes(part)}",
            f"{readable_bytes(held)} before the first step: {held / part:.1f} times as much",
        )


def _judge_peaks(outcome: Outcome) -> tuple[int, int]:
    forward = _largest(outcome, "forward")
    if forward.kept_bytes > _INPUTS_BYTES + 1.5 * _LAYER_BYTES:
        raise Shortcoming(
            "kept-after-forward",
            "after forward only the layers' inputs are in memory"
            f" ({readable_bytes(_INPUTS_BYTES)}; a layer has {readable_bytes(_LAYER_BYTES)})",
            f"{readable_bytes(forward.kept_bytes)} are still allocated,"
            f" {forward.kept_bytes / _LAYER_BYTES:.1f} layers",
        )
    if forward.peak_bytes > _INPUTS_BYTES + 3.5 * _LAYER_BYTES:
        raise _too_much("forward", forward, 2)
    backward = _largest(outcome, "backward")
    if backward.peak_bytes > _MOST_IN_BACKWARD * _LAYER_BYTES:
        raise _too_much("backward", backward, _MOST_IN_BACKWARD)
    return forward.peak_bytes, backward.peak_bytes


def _largest(outcome: Outcome, what: str) -> Allocations:
    """Return the largest rank's allocations, each rank in its smallest step."""
    steps = range(1, _NUM_STEPS + 1)
    by_rank = [[result["peaks"][what, step] for step in steps] for result in outcome.results]
    return Allocations(
        max(min(each.peak_bytes for each in of_rank) for of_rank in by_rank),
        max(min(each.kept_bytes for each in of_rank) for of_rank in by_rank),
    )


def _too_much(what: str, found: Allocations, layers: int) -> Shortcoming:
    return Shortcoming(
        "not-freed",
        f"in {what}, at most the size of {layers} of the {_NUM_LAYERS} layers is allocated at once",
        f"{readable_bytes(found.peak_bytes)} at the peak,"
        f" {found.peak_bytes / _LAYER_BYTES:.1f} layers",
        where=what,
    )


def _judge_prefetch(outcome: Outcome) -> int:
    """Count the layers that were gathered without any computation to overlap."""
    waited = 0
    for what, order in (
        ("forward", range(_NUM_LAYERS)),
        ("backward", range(_NUM_LAYERS - 1, -1, -1)),
    ):
        log = outcome.flow(_section(what, 2)).logs[0]
        late = _asked_late(log, list(order))
        if len(late) > 2:
            raise Shortcoming(
                "no-prefetch",
                "the next layer's parameters are requested before a layer is computed",
                f"layers {', '.join(map(str, late))} were requested after the one before them had"
                " been computed",
                where=what,
            )
        waited += len(late)
    return waited


def _asked_late(log: RankLog, order: Sequence[int]) -> list[int]:
    gathers = [call.index for call in log.collectives if call.kind.startswith("all_gather")]
    late = list(order[:1])
    for before, (layer, asked) in zip(
        order, list(zip(order, gathers, strict=False))[1:], strict=False
    ):
        if asked >= log.marks[_mark(before)]:
            late.append(layer)
    return late


def _judge_bytes(outcome: Outcome) -> tuple[float, float]:
    flows = [outcome.flow(_section(what, 2)) for what in ("forward", "backward")]
    sent = max(sum(both) for both in zip(*(flow.sent() for flow in flows), strict=True))
    size = _LAYER_BYTES * _NUM_LAYERS
    limit = 3 * (_NUM_RANKS - 1) / _NUM_RANKS * size
    if sent > limit * _SLACK:
        raise Shortcoming(
            "too-many-bytes",
            f"no rank sends more than 3(n−1)/n·S = {readable_bytes(limit)} a step",
            f"{readable_bytes(sent)}, {sent / limit:.2g} times as much",
            picture=flows[1].picture(),
        )
    return sent, limit

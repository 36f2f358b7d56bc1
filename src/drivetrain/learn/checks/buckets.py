"""DDP with buckets: the numbers of one process, few messages, and an early start of each.

How early a reduction starts is measured on a simulated clock: backward takes a fixed time per
layer, and a link carries one message after another. A busy machine does not change the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from drivetrain.core.text import readable_bytes
from drivetrain.learn.attempt import Outcome, Shortcoming, run_on_ranks
from drivetrain.learn.flow import RankLog
from drivetrain.learn.training import (
    global_batch,
    gradient_norm,
    largest_difference,
    new_optimizer,
    require_same_training,
    weights_of,
)
from drivetrain.learn.verdict import Passed, Score
from drivetrain.verify.parity.compare import StepNumbers, relative

_NUM_RANKS = 3
_NUM_STEPS = 3
_NUM_LAYERS = 12
_FEATURES, _WIDTH, _CLASSES = 12, 32, 5
_BUCKET_BYTES = 8700  # two layers and a little more
_LAYER_MS = 10.0
_BYTES_PER_MS = 550.0
_LATENCY_MS = 0.5
_WORST_SHARE = 0.75
_ALL_USED = "every rank uses every parameter"
_BY_RANK = "each rank uses one of two heads"


def check(file: Path) -> Passed:
    outcome = run_on_ranks(file, _train, _NUM_RANKS)
    for case in (_ALL_USED, _BY_RANK):
        _judge_numbers(outcome, case)
    logs = outcome.flow(_step(_ALL_USED, 1)).logs
    _judge_buckets(logs[0])
    time_ms, least_ms = _time_ms(logs[0]), _least_ms()
    _judge_start(logs[0], time_ms, least_ms)
    size = _model_bytes()
    return Passed(
        [
            f"{_NUM_STEPS} losses and gradient norms on {_NUM_RANKS} ranks as on one process, also"
            " when ranks leave different parameters unused",
            f"{len(logs[0].collectives)} buckets, the first one started when backward had finished"
            f" {_layers_done(logs[0], logs[0].collectives[0].index)} of {_NUM_LAYERS} layers",
        ],
        [
            Score(
                "bytes a rank sends a step",
                max(outcome.flow(_step(_ALL_USED, 1)).sent()),
                2 * (_NUM_RANKS - 1) / _NUM_RANKS * size,
                "2(n−1)/n·S",
            ),
            Score(
                f"backward and reductions, at {_LAYER_MS:g} ms a layer and"
                f" {_BYTES_PER_MS:g} bytes a ms",
                round(time_ms, 1),
                round(least_ms, 1),
                "backward + the last layer's reduction",
                "ms",
            ),
        ],
        outcome.flow(_step(_ALL_USED, 1)).picture(),
    )


class _Deep(nn.Module):
    """A sequence of layers, and two heads of different sizes."""

    def __init__(self, recorder: Any = None) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.layers = nn.ModuleList(
                nn.Linear(_FEATURES if i == 0 else _WIDTH, _WIDTH) for i in range(_NUM_LAYERS)
            )
            self.small_head = nn.Linear(_WIDTH, _CLASSES)
            self.large_head = nn.Sequential(nn.Linear(_WIDTH, 64), nn.Linear(64, _CLASSES))
        self._recorder = recorder

    def forward(self, values: torch.Tensor, uses_small: bool, uses_large: bool) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            if self._recorder is not None:
                values = _Marked.apply(values, self._recorder, index)  # type: ignore[no-untyped-call]
            values = torch.tanh(layer(values))
        outputs = torch.zeros(len(values), _CLASSES)
        if uses_small:
            outputs = outputs + self.small_head(values)
        if uses_large:
            outputs = outputs + self.large_head(values)
        return outputs


class _Marked(torch.autograd.Function):
    """Identity whose backward runs when the next layer's backward is done, and marks that."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, recorder: Any, index: int) -> torch.Tensor:
        ctx.told = recorder, index
        return values.clone().requires_grad_()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        recorder, index = ctx.told
        recorder.mark(_mark(index))
        return gradients[0], None, None


def _mark(layer: int) -> str:
    return f"backward of layer {layer} is done"


def _step(case: str, step: int) -> str:
    return f"{case}, step {step}"


def _heads(case: str, rank: int) -> tuple[bool, bool]:
    return (True, True) if case == _ALL_USED else (rank % 2 == 0, rank % 2 == 1)


def _batches(step: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each rank's batch; sizes are equal."""
    inputs, classes = global_batch(step)
    for rank in range(_NUM_RANKS):
        yield inputs[rank::_NUM_RANKS].requires_grad_(), classes[rank::_NUM_RANKS]


def _train(module: Any, recorder: Any) -> dict[str, Any]:
    rank = dist.get_rank()
    results: dict[str, Any] = {}
    for case in (_ALL_USED, _BY_RANK):
        model = _Deep(recorder)
        optimizer = new_optimizer(model)
        ddp = module.BucketedDDP(model, _BUCKET_BYTES)
        numbers = {}
        for step in range(1, _NUM_STEPS + 1):
            inputs, classes = list(_batches(step))[rank]
            optimizer.zero_grad()
            recorder.section(_step(case, step))
            loss = nn.functional.cross_entropy(model(inputs, *_heads(case, rank)), classes)
            loss.backward()
            recorder.mark("backward is done")
            ddp.finish()
            numbers[step] = StepNumbers(float(loss.detach()), gradient_norm(model))
            optimizer.step()
        results[case] = numbers, weights_of(model)
    return results


def _reference(case: str) -> dict[int, StepNumbers]:
    model = _Deep()
    optimizer = new_optimizer(model)
    numbers = {}
    for step in range(1, _NUM_STEPS + 1):
        optimizer.zero_grad()
        losses = [
            nn.functional.cross_entropy(model(inputs, *_heads(case, rank)), classes)
            for rank, (inputs, classes) in enumerate(_batches(step))
        ]
        loss = torch.stack(losses).mean()
        loss.backward()
        numbers[step] = StepNumbers(float(loss.detach()), gradient_norm(model))
        optimizer.step()
    return numbers


def _judge_numbers(outcome: Outcome, case: str) -> None:
    reference = _reference(case)
    shown = {"where": case, "picture": outcome.flow(_step(case, 1)).picture()}
    by_rank = [result[case] for result in outcome.results]
    _judge_first_step([n[1].gradient_norm for n, _ in by_rank], reference[1], case, shown)
    means = {s: sum(n[s].loss for n, _ in by_rank) / _NUM_RANKS for s in reference}
    for numbers, weights in by_rank:
        found = {s: numbers[s]._replace(loss=loss) for s, loss in means.items()}
        require_same_training(reference, found, "second-step", **shown)
        if largest_difference(weights, by_rank[0][1]) > 0:
            raise Shortcoming(
                "second-step", "equal copies of the model", "the ranks' weights differ", **shown
            )


def _judge_first_step(
    norms: Sequence[float], reference: StepNumbers, case: str, shown: dict[str, str]
) -> None:
    right = reference.gradient_norm or 0.0
    if len({round(norm, 7) for norm in norms}) > 1:
        raise Shortcoming(
            "ranks-differ" if case == _ALL_USED else "unused",
            "after finish(), every rank has the same gradients",
            "gradient norms of step 1: "
            + ", ".join(f"rank {rank} {norm:.4f}" for rank, norm in enumerate(norms)),
            **shown,
        )
    if relative(norms[0], right) > 1e-3:
        raise Shortcoming(
            _scale_hint(norms[0] / right, case),
            f"step 1: gradient norm {right:.5f}, of the mean over all ranks",
            f"{norms[0]:.5f}, {norms[0] / right:.4g} times as much",
            **shown,
        )


def _scale_hint(ratio: float, case: str) -> str:
    if abs(ratio / _NUM_RANKS - 1) < 0.01:
        return "not-divided"
    if abs(ratio * _NUM_RANKS - 1) < 0.01:
        return "divided-twice"
    return "wrong-gradient" if case == _ALL_USED else "unused"


def _sizes() -> list[int]:
    return [p.numel() * p.element_size() for p in _Deep().parameters()]


def _model_bytes() -> int:
    return sum(_sizes())


def _num_buckets() -> int:
    """Return the number of buckets if each is filled as far as possible."""
    count, filled = 1, 0
    for size in reversed(_sizes()):
        if filled + size > _BUCKET_BYTES:
            count, filled = count + 1, 0
        filled += size
    return count


def _judge_buckets(log: RankLog) -> None:
    reductions = [call for call in log.collectives if call.num_bytes]
    largest = max(reductions, key=lambda call: call.num_bytes, default=None)
    if largest is not None and largest.num_bytes > _BUCKET_BYTES:
        raise Shortcoming(
            "too-large",
            f"no bucket has more than {readable_bytes(_BUCKET_BYTES)}",
            f"one of {readable_bytes(largest.num_bytes)} in line {largest.line}",
        )
    if len(reductions) > _num_buckets() + 2:
        raise Shortcoming(
            "too-many-messages",
            f"about {_num_buckets()} messages a step: buckets filled up to"
            f" {readable_bytes(_BUCKET_BYTES)}",
            f"{len(reductions)} messages, for {len(_sizes())} parameters",
        )


def _judge_start(log: RankLog, time_ms: float, least_ms: float) -> None:
    if least_ms / time_ms >= _WORST_SHARE:
        return
    posted = [call.index for call in log.collectives]
    after = sum(index >= log.marks["backward is done"] for index in posted)
    late = sum(index >= log.marks[_mark(1)] for index in posted)
    hint = "no-overlap" if after == len(posted) else "late-start"
    found = (
        f"all {len(posted)} were started after backward had finished"
        if after == len(posted)
        else f"{late} of {len(posted)} were started when only layer 0 was left"
    )
    raise Shortcoming(
        hint,
        f"reductions are started as soon as their bucket is full: backward and reductions take"
        f" {least_ms:.0f} ms at best, the limit is {least_ms / _WORST_SHARE:.0f} ms (a layer"
        f" {_LAYER_MS:g} ms, a link of {_BYTES_PER_MS:g} bytes a ms)",
        f"{time_ms:.0f} ms: {found}",
    )


def _time_ms(log: RankLog) -> float:
    """Return the simulated time: a fixed time per layer, one reduction at a time on the link."""
    link_free_ms = 0.0
    for call in log.collectives:
        begin_ms = max(link_free_ms, _layers_done(log, call.index) * _LAYER_MS)
        link_free_ms = begin_ms + _reduction_ms(call.num_bytes)
    return max(link_free_ms, _NUM_LAYERS * _LAYER_MS)


def _layers_done(log: RankLog, call: int) -> int:
    return sum(log.marks[_mark(layer)] <= call for layer in range(_NUM_LAYERS))


def _reduction_ms(num_bytes: float) -> float:
    return _LATENCY_MS + num_bytes / _BYTES_PER_MS


def _least_ms() -> float:
    """Return the least time: the first layer's gradients come last, with nothing to overlap."""
    return _NUM_LAYERS * _LAYER_MS + _reduction_ms(sum(_sizes()[:2]))

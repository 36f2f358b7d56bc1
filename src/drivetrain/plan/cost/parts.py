"""The parts of a model that a rank has, and what it passes to collectives in a step."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import lru_cache

from drivetrain.parallel.pipeline.anatomy import balanced_stages
from drivetrain.plan.candidate import Candidate
from drivetrain.plan.profile.model import ModelProfile, part_numbers
from drivetrain.plan.profile.profiling import TRACED_EP
from drivetrain.strategies.cost import PartNumbers, WorkNumbers

# The parts of the model in each pipeline stage, with the same split as the pipeline itself.


def stage_parts(profile: ModelProfile, num_stages: int) -> list[tuple[int, ...]]:
    """Return, per stage, the traced parts in execution order."""
    positions = profile.shape.positions()
    if num_stages == 1:
        return [tuple(positions)]
    weights = tuple(round(part.sizes.num_parameters.one(1)) for part in profile.parts)
    costs = tuple(weights[position] for position in positions)
    stages = []
    for index, blocks in enumerate(_cut(costs, num_stages)):
        parts = [positions[1 + block] for block in blocks]
        if index == 0:
            parts.insert(0, positions[0])
        if index == num_stages - 1:
            parts.append(positions[-1])
        stages.append(tuple(parts))
    return stages


@lru_cache(maxsize=512)
def _cut(costs: tuple[int, ...], num_stages: int) -> tuple[range, ...]:
    """Split the blocks into stages; `costs` are those of front, blocks and back."""
    return tuple(balanced_stages(costs[1:-1], (costs[0], costs[-1]), num_stages))


# A rank's parts under context parallelism: 1/cp of the sequence, with the following exceptions.
#
# Each block gathers the keys and values of the full sequence, in forward and backward, and in
# backward also has their gradients; a query attends to all keys. The model's output is gathered on
# every rank, so the loss is computed on the full sequence. Keys and values are assumed to be as
# wide as the hidden state, which is too much for grouped-query attention.


def rank_parts(profile: ModelProfile, candidate: Candidate) -> tuple[PartNumbers, ...]:
    """Return every traced part, at the size that one rank has."""
    batch, tp, cp = candidate.micro_batch_size, candidate.layout.tp, candidate.layout.cp
    numbers = part_numbers(profile, batch, 1.0 / cp, tp)
    if candidate.layout.ep > 1:
        numbers = tuple(_with_own_experts(part, candidate) for part in numbers)
    if cp == 1:
        return numbers
    hidden = profile.hand_over_bytes.one(batch, 1.0, tp)
    whole = part_numbers(profile, batch, 1.0, tp)
    both = zip(numbers[1:-1], whole[1:-1], strict=True)
    blocks = [_block(part, all_of_it, cp, 2 * hidden) for part, all_of_it in both]
    return (numbers[0], *blocks, _back(whole[-1], numbers[-1].saved))


def _with_own_experts(part: PartNumbers, candidate: Candidate) -> PartNumbers:
    """Count gradients of the experts that a rank has; the trace had them on `TRACED_EP` ranks."""
    way = candidate.way
    traced = part.trained_experts * (0.5 if way.weights_cast and way.precision != "fp32" else 1.0)
    fewer = traced * (1 / TRACED_EP - 1 / candidate.layout.ep)
    work = part.backward
    most = max(work.peak, work.peak_with_gradients - fewer)
    back = replace(work, peak_with_gradients=most, gradients=work.gradients - fewer)
    return replace(part, backward=back)


def _back(part: PartNumbers, own: float) -> PartNumbers:
    """Add the rank's part of the output, which exists next to the full output in gather and split.

    `own`: what the loss of a part would save, which is about the size of a part of the output.
    """
    return replace(part, forward=_more(part.forward, own), backward=_more(part.backward, own))


def _block(part: PartNumbers, whole: PartNumbers, cp: int, gathered: float) -> PartNumbers:
    """Add the `gathered` bytes of the full sequence's keys and values, and its attention."""
    forward = _more(part.forward, gathered)
    backward = _more(part.backward, 2 * gathered)
    return replace(
        part,
        forward=replace(forward, attention_flops=whole.forward.attention_flops / cp),
        backward=replace(backward, attention_flops=whole.backward.attention_flops / cp),
    )


def _more(work: WorkNumbers, num_bytes: float) -> WorkNumbers:
    """Return the numbers with `num_bytes` added to the peak."""
    return replace(
        work,
        peak=work.peak + num_bytes,
        peak_with_gradients=work.peak_with_gradients + num_bytes,
    )


# What a rank of a stage passes to collectives in one step: bytes by kind and axis.
#
# As everywhere, bytes are those of the full tensor: a gather's output, a reduce-scatter's input.
# Small messages that every strategy also sends (counts, losses, norms) are not included.

Exchanged = dict[tuple[str, str], float]
"""Bytes by (collective, axes)."""


def exchanged_bytes(profile: ModelProfile, candidate: Candidate, stage: int) -> Exchanged:
    """Return what the strategy, tp, ep, cp and pp send."""
    layout = candidate.layout
    numbers = rank_parts(profile, candidate)
    indices = stage_parts(profile, layout.pp)[stage]
    turns = candidate.accumulation
    found: Exchanged = defaultdict(float)
    for index in indices:
        part = numbers[index]
        for axis, kind, num_bytes, _ in (*part.forward.exchanges, *part.backward.exchanges):
            found[kind, axis] += turns * num_bytes
    parts = [numbers[index] for index in indices]
    is_root = [index in (0, len(numbers) - 1) for index in indices]
    for each in candidate.cost.exchanges(parts, is_root, candidate.use):
        found[each.kind, " × ".join(each.axes)] += each.times * each.num_bytes
    if layout.cp > 1:  # keys and values of each block; without the gather of the model's output
        hidden = profile.hand_over_bytes.one(candidate.micro_batch_size, 1.0, layout.tp)
        both = turns * profile.shape.num_blocks * 2 * hidden
        found["all_gather", "cp"] += both * (2 if candidate.recompute == "none" else 3)
        found["reduce_scatter", "cp"] += both
    if layout.pp > 1:
        size = (candidate.micro_batch_size, 1.0 / layout.cp, layout.tp)
        hidden = profile.hand_over_bytes.one(*size)
        sides = int(stage > 0) + int(stage < layout.pp - 1)
        for kind in ("send", "recv"):
            found[kind, "pp"] += turns * sides * hidden
    return {key: value for key, value in found.items() if value}

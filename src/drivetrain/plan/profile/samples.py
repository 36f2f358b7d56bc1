"""Fit traces at a few sizes to a profile for any size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from drivetrain.parallel.expert.finding import find_experts
from drivetrain.plan.profile.model import (
    Array,
    Growth,
    ModelProfile,
    PartProfile,
    PartSizes,
    PartWork,
    Shape,
    Size,
    Way,
    fit,
)
from drivetrain.plan.profile.trace import Span, StepTrace

_SIZES = (
    *("parameters", "trained", "optimizer", "buffers", "num_parameters", "num_weights"),
    *("experts", "trained_experts"),
)


@dataclass(frozen=True)
class Direction:
    """One direction through one part, as numbers at one size."""

    live: Array
    gradients: Array
    flops: float
    attention_flops: float
    moved_bytes: float
    curved_bytes: float
    num_operations: int
    num_products: int
    exchanged: Mapping[tuple[str, str], Sequence[float]]

    @classmethod
    def of(cls, span: Span, base: int) -> Direction:
        """Create from a span; `base` is the number of bytes alive at the start of its forward."""
        gradients = np.array(span.gradients, dtype=np.float64)
        return cls(
            np.array(span.live, dtype=np.float64) - base,
            gradients - gradients[0] if gradients.size else gradients,
            span.flops,
            span.attention_flops,
            span.moved_bytes,
            span.curved_bytes,
            span.num_operations,
            span.num_products,
            dict(span.exchanged),
        )


@dataclass(frozen=True)
class PartSample:
    """One part at one size."""

    sizes: Mapping[str, float]
    saved: float
    forward: Direction
    backward: Direction


@dataclass(frozen=True)
class Sample:
    """A whole step at one size."""

    parts: tuple[PartSample, ...]
    hand_over_bytes: float
    batch_bytes: float
    optimizer_extra: float
    optimizer_moved: float
    """Bytes read and written by the optimizer, per byte of trained weights."""
    optimizer_operations: float
    """Operations of the optimizer, per weight."""

    @classmethod
    def of(
        cls,
        trace: StepTrace,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        shape: Shape,
        state: Mapping[int, int],
        batch_bytes: int,
        scale: float = 1.0,
    ) -> Sample:
        """Create from a trace and its model; weights at rest are `scale` times as large."""
        groups = _weights_by_part(model, blocks, shape)
        experts = {id(p) for each in find_experts(model) for p in each.module.parameters()}
        begins = [span.begins_at for span in trace.forward]
        ends = [*begins[1:], trace.forward[-1].live[-1]]
        parts = tuple(
            PartSample(
                _sizes(group, state, experts, scale),
                float(end - begin),
                Direction.of(forward, begin),
                Direction.of(backward, begin),
            )
            for group, begin, end, forward, backward in zip(
                groups, begins, ends, trace.forward, trace.backward, strict=True
            )
        )
        after = trace.optimizer.live
        weights = [_bytes(p) for p in model.parameters() if p.requires_grad]
        trained_bytes = max(1, sum(weights))
        return cls(
            parts,
            float(trace.hand_over_bytes),
            float(batch_bytes),
            float(max(after, default=0) - (after[0] if after else 0)),
            trace.optimizer.moved_bytes / trained_bytes,
            trace.optimizer.num_operations / max(1, len(weights)),
        )


def profile_from(way: Way, shape: Shape, samples: Mapping[Size, Sample]) -> ModelProfile:
    """Fit every quantity through the sizes that were traced."""

    def grown(pick: Callable[[Sample], float]) -> Growth:
        return fit({size: np.array(pick(sample)) for size, sample in samples.items()})

    first = next(iter(samples.values()))
    names = ["front", *(f"block {index}" for index in shape.kept), "back"]
    parts = tuple(
        _part(name, {size: sample.parts[i] for size, sample in samples.items()})
        for i, name in enumerate(names)
    )
    return ModelProfile(
        way,
        shape,
        parts,
        grown(lambda sample: sample.hand_over_bytes),
        grown(lambda sample: sample.batch_bytes),
        grown(lambda sample: sample.optimizer_extra),
        first.optimizer_moved,
        first.optimizer_operations,
    )


def _part(name: str, samples: Mapping[Size, PartSample]) -> PartProfile:
    sizes = {
        what: fit({size: np.array(sample.sizes[what]) for size, sample in samples.items()})
        for what in _SIZES
    }
    return PartProfile(
        name,
        PartSizes(**sizes),
        fit({size: np.array(sample.saved) for size, sample in samples.items()}),
        _work({size: sample.forward for size, sample in samples.items()}),
        _work({size: sample.backward for size, sample in samples.items()}),
    )


def _work(samples: Mapping[Size, Direction]) -> PartWork:
    kinds = {kind for sample in samples.values() for kind in sample.exchanged}
    calls = {
        kind: max(len(sample.exchanged.get(kind, ())) for sample in samples.values())
        for kind in kinds
    }

    def grown(what: str) -> Growth:
        return fit({size: np.array(getattr(sample, what)) for size, sample in samples.items()})

    return PartWork(
        _series({size: sample.live for size, sample in samples.items()}),
        _series({size: sample.gradients for size, sample in samples.items()}),
        grown("flops"),
        grown("attention_flops"),
        grown("moved_bytes"),
        grown("curved_bytes"),
        float(max(sample.num_operations for sample in samples.values())),
        float(max(sample.num_products for sample in samples.values())),
        {
            kind: fit(
                {
                    size: np.array(float(sum(sample.exchanged.get(kind, ()))))
                    for size, sample in samples.items()
                }
            )
            for kind in sorted(kinds)
        },
        calls,
    )


def _series(samples: Mapping[Size, Array]) -> Growth:
    """Fit point by point if all sizes have the same number of points, else fit the maxima."""
    if len({series.size for series in samples.values()}) == 1:
        return fit(samples)
    return fit({s: np.array([series.max()]) for s, series in samples.items()})


def _weights_by_part(
    model: nn.Module, blocks: Sequence[nn.Module], shape: Shape
) -> list[tuple[list[nn.Parameter], list[torch.Tensor]]]:
    """Return the weights and buffers of front, blocks and back; each weight once."""
    seen: set[int] = set()

    def new(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        fresh = [tensor for tensor in tensors if id(tensor) not in seen]
        seen.update(id(tensor) for tensor in fresh)
        return fresh

    def both(modules: Sequence[nn.Module]) -> tuple[list[nn.Parameter], list[torch.Tensor]]:
        weights = new(p for m in modules for p in m.parameters())
        return weights, new(b for m in modules for b in m.buffers())  # type: ignore[return-value]

    middle = [both([block]) for block in blocks]
    front = both([model.get_submodule(name) for name in shape.front])
    back = both([model.get_submodule(name) for name in shape.back])
    rest = both([model])  # what is neither before nor after the blocks
    return [(front[0] + rest[0], front[1] + rest[1]), *middle, back]


def _sizes(
    group: tuple[list[nn.Parameter], list[torch.Tensor]],
    state: Mapping[int, int],
    experts: Set[int],
    scale: float,
) -> dict[str, float]:
    weights, buffers = group
    of_experts = [p for p in weights if id(p) in experts]
    return {
        "parameters": scale * sum(map(_bytes, weights)),
        "trained": scale * sum(_bytes(p) for p in weights if p.requires_grad),
        "optimizer": scale * sum(state.get(id(p), 0) for p in weights),
        "buffers": float(sum(map(_bytes, buffers))),
        "num_parameters": float(sum(_local(p).numel() for p in weights)),
        "num_weights": float(len(weights)),
        "experts": scale * sum(map(_bytes, of_experts)),
        "trained_experts": scale * sum(_bytes(p) for p in of_experts if p.requires_grad),
    }


def _local(tensor: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def _bytes(tensor: torch.Tensor) -> int:
    local = _local(tensor)
    return local.numel() * local.element_size()

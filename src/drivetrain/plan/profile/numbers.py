"""A profile at one size: each traced part as a few numbers, from which any rank is added up."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from drivetrain.plan.profile.model import ModelProfile, PartProfile, PartWork
from drivetrain.strategies.cost import PartNumbers, WorkNumbers


@lru_cache(maxsize=4096)
def _numbers(key: _Key) -> tuple[PartNumbers, ...]:
    return tuple(_part(part, key.batch, key.length, key.tp) for part in key.profile.parts)


def part_numbers(
    profile: ModelProfile, batch: float, length: float = 1.0, tp: int = 1
) -> tuple[PartNumbers, ...]:
    """Every traced part at one size."""
    return _numbers(_Key(profile, batch, length, tp))


class _Key:
    """Hashes by the profile's identity: its arrays have none."""

    def __init__(self, profile: ModelProfile, batch: float, length: float, tp: int) -> None:
        self.profile, self.batch, self.length, self.tp = profile, batch, length, tp
        self._values = (id(profile), batch, length, tp)

    def __hash__(self) -> int:
        return hash(self._values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self._values == other._values


def _part(part: PartProfile, batch: float, length: float, tp: int) -> PartNumbers:
    sizes = part.sizes
    return PartNumbers(
        sizes.parameters.one(1, 1.0, tp),
        sizes.trained.one(1, 1.0, tp),
        sizes.optimizer.one(1, 1.0, tp),
        sizes.buffers.one(1, 1.0, tp),
        sizes.num_weights.one(1, 1.0, tp),
        part.saved.one(batch, length, tp),
        _work(part.forward, batch, length, tp),
        _work(part.backward, batch, length, tp),
    )


def _work(work: PartWork, batch: float, length: float, tp: int) -> WorkNumbers:
    live = work.live.at(batch, length, tp)
    gradients = work.gradients.at(batch, length, tp)
    both = live + gradients if live.shape == gradients.shape else live + np.max(gradients)
    has_any = live.size > 0
    return WorkNumbers(
        float(live.max()) if has_any else 0.0,
        float(both.max()) if has_any else 0.0,
        float(gradients[-1]) if gradients.size else 0.0,
        float(live[-1]) if has_any else 0.0,
        work.flops.one(batch, length, tp),
        work.attention_flops.one(batch, length, tp),
        work.moved_bytes.one(batch, length, tp),
        work.curved_bytes.one(batch, length, tp),
        work.num_operations,
        work.num_products,
        tuple(
            (kind, growth.one(batch, length, tp), work.num_exchanges[kind])
            for kind, growth in work.exchanged_bytes.items()
        ),
    )

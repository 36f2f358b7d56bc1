"""A shuffled order that is computed, not stored: `order.ids(positions)` for any positions.

A keyed Feistel network permutes the smallest [0, 2^b) that contains all ids; values outside
[0, length) are permuted again until they fall inside (cycle walking). Any rank can compute any
position of any epoch directly, without a list of all ids: a billion samples need no more memory
than ten.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from drivetrain.data.keys import fold

_NUM_ROUNDS = 8
# Small datasets use a larger domain, because narrower halves would not mix.
_MIN_BITS = 6
_MASK = 0xFFFFFFFF


@dataclass(frozen=True)
class Order:
    """One epoch's order of sample ids, a pure function of (length, seed, epoch)."""

    length: int
    seed: int
    epoch: int
    shuffle: bool = True

    def ids(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the sample ids at these positions."""
        if not self.shuffle or self.length < 2:
            return positions
        bits = max(_MIN_BITS, (self.length - 1).bit_length())
        keys = [fold(self.seed, self.epoch, index) & _MASK for index in range(_NUM_ROUNDS)]
        ids = _feistel(positions, bits, keys)
        outside = (ids >= self.length).nonzero().squeeze(1)
        while len(outside):  # less than half are outside each time
            walked = _feistel(ids[outside], bits, keys)
            ids[outside] = walked
            outside = outside[walked >= self.length]
        return ids


def _feistel(values: torch.Tensor, bits: int, keys: list[int]) -> torch.Tensor:
    """Change each half in turn by a hash of the other, which is invertible at any width."""
    low_bits = bits // 2
    low_mask, high_mask = (1 << low_bits) - 1, (1 << (bits - low_bits)) - 1
    high, low = values >> low_bits, values & low_mask
    for index, key in enumerate(keys):
        if index % 2:
            high ^= _mix(low, key) & high_mask
        else:
            low ^= _mix(high, key) & low_mask
    return (high << low_bits) | low


def _mix(values: torch.Tensor, key: int) -> torch.Tensor:
    """A 32-bit integer hash; products wrap in int64 and only their low 32 bits are kept."""
    mixed = values ^ key
    mixed ^= mixed >> 16
    mixed *= 0x7FEB352D
    mixed &= _MASK
    mixed ^= mixed >> 15
    mixed *= 0x846CA68B
    mixed &= _MASK
    mixed ^= mixed >> 16
    return mixed

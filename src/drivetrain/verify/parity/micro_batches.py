"""Does a script's training depend on its micro-batch size? Under `auto` the ranks choose it. Pure.

A plain loss is taken for a mean over the samples of its micro-batch. A sum, or a mean over anything
else, weighs micro-batches wrongly, and how wrongly depends on their size; dropout draws its masks,
and batch norm its statistics, per micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from drivetrain.verify.parity.compare import Numbers, Parting, relative
from drivetrain.verify.parity.layouts import AskedLayout

_SAME_FACTOR = 1e-2
"""A sum grows exactly with its micro-batch; dropout changes it a little."""


@dataclass(frozen=True)
class SizeDependence:
    """One process trains differently in micro-batches of another size."""

    fixed: int
    """The size in which all layouts were compared."""
    other: int
    """The size that `auto` chooses for one process."""
    parting: Parting
    """At `fixed` (reference) and at `other` (here)."""
    is_sum: bool
    """Whether the first loss grows with the size: the script's loss is a sum over the samples."""


def shared_micro_batch(global_batch_size: int, num_ranks: int) -> int:
    """A micro-batch size that all layouts can use, for a script that does not set one."""
    most = max(1, global_batch_size // num_ranks)
    return max(size for size in range(1, most + 1) if global_batch_size % size == 0)


def differ_under_auto(layouts: Sequence[AskedLayout]) -> bool:
    """Whether `auto` chooses another size for one of these layouts than for one process."""
    return any(layout.num_shares > 1 for layout in layouts)


def grows_with_size(fixed: int, at_fixed: Numbers, other: int, at_other: Numbers) -> bool:
    """Whether the first step's loss, of the same weights and samples, is as many times larger."""
    first = min(at_fixed, default=0)
    if first not in at_other or at_fixed[first].loss == 0 or fixed == other:
        return False
    factor = at_other[first].loss / at_fixed[first].loss
    return math.isfinite(factor) and relative(factor, other / fixed) < _SAME_FACTOR

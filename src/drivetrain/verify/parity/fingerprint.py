"""A tensor in a few numbers: enough to see whether two differ, and by how much."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch

_WIDTH = 1024


class Fingerprint(NamedTuple):
    """The numbers kept of a tensor."""

    numel: int
    total: float
    norm: float
    projection: float
    """A sum with fixed random signs: a swap or shift that leaves `total` alone changes it."""
    slack: float = 0.0
    """How far rounding alone may have moved the value; this much does not count as a deviation."""


def fingerprint(tensor: torch.Tensor) -> Fingerprint:
    """Computed in float64; tensors with equal bits have equal fingerprints."""
    flat = tensor.detach().reshape(-1).double()
    rows = -(-flat.numel() // _WIDTH)
    padded = torch.nn.functional.pad(flat, (0, rows * _WIDTH - flat.numel()))
    # signs along both dims, so that no two positions have the same weight by construction
    by_row = padded.view(rows, _WIDTH) @ _signs(_WIDTH, 0, flat.device)
    projection = by_row @ _signs(rows, 1, flat.device)
    values = torch.stack([flat.sum(), torch.linalg.vector_norm(flat), projection])
    return Fingerprint(flat.numel(), *values.tolist())


def of_number(value: float) -> Fingerprint:
    """The fingerprint of a plain number, like that of a tensor with one element."""
    return Fingerprint(1, value, abs(value), value)


def together(parts: list[Fingerprint]) -> Fingerprint:
    """Combine shards of one tensor. Their positions are unknown, so there is no projection."""
    return Fingerprint(
        sum(part.numel for part in parts),
        sum(part.total for part in parts),
        math.sqrt(sum(part.norm**2 for part in parts)),
        math.nan,
    )


def deviation(here: Fingerprint, reference: Fingerprint, least_scale: float = 0.0) -> float:
    """Deviation relative to the reference's norm, or to `least_scale` if that is larger."""
    if here.numel != reference.numel:
        return math.inf
    if math.isnan(here.projection) and not math.isnan(here.norm):  # combined shards
        spread = math.sqrt(max(1, here.numel))
        apart = max(abs(here.norm - reference.norm), abs(here.total - reference.total) / spread)
    else:
        apart = max(abs(here.norm - reference.norm), abs(here.projection - reference.projection))
    if not math.isfinite(apart):
        return 0.0 if here.norm == reference.norm else math.inf
    apart = max(0.0, apart - here.slack - reference.slack)
    scale = max(reference.norm, least_scale)
    return apart / scale if scale else (math.inf if apart else 0.0)


@lru_cache(maxsize=32)
def _signs(length: int, seed: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 2, (length,), generator=generator)
    return (bits * 2 - 1).double().to(device)

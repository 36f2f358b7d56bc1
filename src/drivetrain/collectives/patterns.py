"""Test data for tensors: integers small enough that every sum of them is exact.

Element i of rank r is p(i) + w(r). A reduction over n ranks must then give n·p(i) + Σw, which each
rank can compute without the others' tensors. The moduli are primes, so a tensor shifted by a power
of two does not match the pattern.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from drivetrain.core.errors import ConfigError, Problem

DTYPES = {
    "int8": torch.int8,
    "uint8": torch.uint8,
    "int32": torch.int32,
    "int64": torch.int64,
    "half": torch.float16,
    "float": torch.float32,
    "double": torch.float64,
    "bfloat16": torch.bfloat16,
}
_EXACT = {
    "int8": 127,
    "uint8": 254,  # 255 marks outputs that were not written
    "int32": 1 << 30,
    "int64": 1 << 30,
    "half": 1 << 11,
    "float": 1 << 24,
    "double": 1 << 30,
    "bfloat16": 1 << 8,
}
"""Up to this value the type represents every integer exactly."""
_PRIMES = (8191, 1021, 509, 251, 127, 61, 31, 13, 7, 5, 3, 2)
_PIECE = 1 << 20
"""Elements at a time: the host computes them in 64 bits."""


class Pattern:
    """The data of one check; each `repetition` has different data."""

    def __init__(self, dtype: str, num_ranks: int, redop: str | None, repetition: int = 0) -> None:
        summed = num_ranks if redop == "sum" else 1
        most = _EXACT[dtype] // summed
        prime = next((p for p in _PRIMES if 2 * (p - 1) <= most), None)
        if prime is None:
            rule = f"cannot hold sums over {num_ranks} ranks exactly"
            raise ConfigError([Problem("--dtype", rule, "use float, or --redop max", dtype)])
        self._prime = prime
        self._num_ranks = num_ranks
        self._redop = redop
        self._repetition = repetition
        self.poison = -1 if DTYPES[dtype].is_signed else 255
        """Never a result: the initial value of outputs."""

    def of_rank(self, rank: int, index: torch.Tensor) -> torch.Tensor:
        """Return the elements of a rank's tensor at these positions."""
        return self._by_place(index) + self._by_rank(rank)

    def reduced(self, index: torch.Tensor) -> torch.Tensor:
        """Return the reduction of all ranks' tensors at these positions."""
        weights = [self._by_rank(rank) for rank in range(self._num_ranks)]
        if self._redop == "sum":
            return self._num_ranks * self._by_place(index) + sum(weights)
        return self._by_place(index) + (min(weights) if self._redop == "min" else max(weights))

    def _by_place(self, index: torch.Tensor) -> torch.Tensor:
        return (index * (2 * self._repetition + 1) + self._repetition) % self._prime

    def _by_rank(self, rank: int) -> int:
        return (3 * rank + self._repetition) % self._prime


def pieces(count: int) -> Iterator[torch.Tensor]:
    """Yield the positions 0 … count - 1 in blocks."""
    for start in range(0, count, _PIECE):
        yield torch.arange(start, min(count, start + _PIECE))


def write(tensor: torch.Tensor, values: Iterable[torch.Tensor]) -> None:
    """Fill a flat tensor, piece by piece."""
    start = 0
    for piece in values:
        tensor[start : start + piece.numel()].copy_(piece)
        start += piece.numel()


def count_wrong(tensor: torch.Tensor, values: Iterable[torch.Tensor]) -> int:
    """Return the number of elements that do not equal `values` exactly."""
    wrong, start = 0, 0
    for piece in values:
        found = tensor[start : start + piece.numel()].to("cpu", torch.float64)
        wrong += int((found != piece.to(torch.float64)).sum())
        start += piece.numel()
    return wrong

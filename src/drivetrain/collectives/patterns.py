"""What tensors are filled with: whole numbers, small enough for every sum of them to be exact.

Element i of rank r is p(i) + w(r). A reduction over n ranks has then to be n·p(i) + Σw, which any
rank knows without having seen the others' tensors. The moduli are primes, so that a tensor shifted
by a power of two is no tensor of the pattern.
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
    "uint8": 254,  # 255 is what no result may be
    "int32": 1 << 30,
    "int64": 1 << 30,
    "half": 1 << 11,
    "float": 1 << 24,
    "double": 1 << 30,
    "bfloat16": 1 << 8,
}
"""Up to here every whole number is one of the type's."""
_PRIMES = (8191, 1021, 509, 251, 127, 61, 31, 13, 7, 5, 3, 2)
_PIECE = 1 << 20
"""Elements at a time: the host works them out in 64 bit."""


class Pattern:
    """The numbers of one check; another `repetition` has other ones."""

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
        """No result: what outputs hold before."""

    def of_rank(self, rank: int, index: torch.Tensor) -> torch.Tensor:
        """Elements at these places of a rank's own tensor."""
        return self._by_place(index) + self._by_rank(rank)

    def reduced(self, index: torch.Tensor) -> torch.Tensor:
        """The same places of all ranks' tensors, reduced."""
        weights = [self._by_rank(rank) for rank in range(self._num_ranks)]
        if self._redop == "sum":
            return self._num_ranks * self._by_place(index) + sum(weights)
        return self._by_place(index) + (min(weights) if self._redop == "min" else max(weights))

    def _by_place(self, index: torch.Tensor) -> torch.Tensor:
        return (index * (2 * self._repetition + 1) + self._repetition) % self._prime

    def _by_rank(self, rank: int) -> int:
        return (3 * rank + self._repetition) % self._prime


def pieces(count: int) -> Iterator[torch.Tensor]:
    """The places 0 … count - 1, some at a time."""
    for start in range(0, count, _PIECE):
        yield torch.arange(start, min(count, start + _PIECE))


def write(tensor: torch.Tensor, values: Iterable[torch.Tensor]) -> None:
    """Fill a flat tensor, piece by piece."""
    start = 0
    for piece in values:
        tensor[start : start + piece.numel()].copy_(piece)
        start += piece.numel()


def count_wrong(tensor: torch.Tensor, values: Iterable[torch.Tensor]) -> int:
    """Elements that are not exactly these."""
    wrong, start = 0, 0
    for piece in values:
        found = tensor[start : start + piece.numel()].to("cpu", torch.float64)
        wrong += int((found != piece.to(torch.float64)).sum())
        start += piece.numel()
    return wrong

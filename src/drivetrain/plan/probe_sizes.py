"""How large a probe's operations are: on an accelerator, too large for its cache. Pure.

A tensor that fits into the last-level cache is read from there, several times as fast as from
memory, and a training step's tensors do not fit.
"""

from __future__ import annotations

from dataclasses import dataclass

TIMES_CACHE = 4
"""A tensor this many times the cache is read from memory but for a fraction of it."""
MEMORY_PER_TENSOR = 256
"""Where the cache's size is not told, or only that of its first levels: a part of the memory. The
largest that is not told (the MI300X's Infinity Cache) is 1/750 of its device's memory."""
MOST_OF_MEMORY = 128
"""Some fifteen tensors are held at once: they must not fill a device."""


@dataclass(frozen=True)
class ProbeSizes:
    """What is measured, from small to large."""

    sides: tuple[int, ...]
    """Of square matrix products."""
    rows: int
    """Of the tensor whose reading and writing is timed, in fp32."""
    columns: int
    attention: tuple[int, int, int, int]
    """batch, heads, length, width"""
    messages: tuple[int, ...]
    """Bytes of a collective's whole."""

    @property
    def tensor_bytes(self) -> int:
        """Of the tensor whose reading and writing is timed."""
        return 4 * self.rows * self.columns


HOST = ProbeSizes(
    sides=(64, 128, 256, 512, 1024),
    rows=4096,
    columns=512,
    attention=(4, 4, 256, 64),
    messages=(1 << 12, 1 << 16, 1 << 20, 1 << 23),
)
"""Small, because a host is slow; what it keeps at once is larger than its cache."""


def accelerator_sizes(memory_bytes: int, cache_bytes: int | None) -> ProbeSizes:
    """For a device with so much memory, and such a last-level cache if it tells."""
    wanted = max(TIMES_CACHE * (cache_bytes or 0), memory_bytes // MEMORY_PER_TENSOR)
    tensor_bytes = min(wanted, memory_bytes // MOST_OF_MEMORY)
    columns = 4096
    side = 1024
    while 3 * 2 * side**2 < tensor_bytes:  # two factors and a product, in 16 bit
        side *= 2
    return ProbeSizes(
        sides=tuple(side >> shift for shift in range(5, -1, -1)),
        rows=-(-tensor_bytes // (4 * columns)),
        columns=columns,
        attention=(8, 16, 2048, 64),
        messages=(1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 28),
    )

"""Layout: how many ranks along each axis, as a frozen value.

A rank's coordinates are its digits in a mixed-radix number, outermost axis first. The order puts
the axes that communicate most on neighbouring ranks: `tp` innermost, `pp` outermost. Everything
here is arithmetic and works at any world size; only `build_mesh` needs a process group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from drivetrain.core.errors import LayoutError, Problem

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
FREE = -1


class Coordinates(NamedTuple):
    """A rank's position along each axis."""

    pp: int = 0
    dp_replicate: int = 0
    dp_shard: int = 0
    cp: int = 0
    tp: int = 0


@dataclass(frozen=True)
class Layout:
    """Axis sizes; their product is the world size."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    """Number of neighbours along dp_shard that share a layer's experts; not a separate axis."""

    def __post_init__(self) -> None:
        wrong = [
            Problem(axis, "an axis needs at least one rank", "use a positive number", size)
            for axis, size in (*zip(AXES, self.sizes, strict=True), ("ep", self.ep))
            if size < 1
        ]
        if not wrong and self.dp_shard % self.ep:
            rule = f"does not divide the {self.dp_shard} ranks along dp_shard, which it splits"
            remedy = f"use {_divisors_of(self.dp_shard)}, or other axes"
            wrong = [Problem("parallel.ep", rule, remedy, self.ep)]
        if wrong:
            raise LayoutError(wrong)

    @classmethod
    def resolve(cls, world_size: int, **sizes: int) -> Layout:
        """Return the layout of `world_size` ranks; one axis may be FREE and takes the rest."""
        ep = sizes.pop("ep", 1)
        free = [axis for axis, size in sizes.items() if size == FREE]
        if len(free) > 1:
            raise LayoutError(
                [Problem(axis, "only one axis can be free", "give it a size") for axis in free]
            )
        fixed = math.prod(size for size in sizes.values() if size != FREE)
        if fixed < 1 or world_size % fixed or (not free and fixed != world_size):
            raise LayoutError([_mismatch(world_size, sizes, fixed, free)])
        if free:
            sizes[free[0]] = world_size // fixed
        return cls(**sizes, ep=ep)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Axis sizes, outermost first."""
        return (self.pp, self.dp_replicate, self.dp_shard, self.cp, self.tp)

    @property
    def world_size(self) -> int:
        return math.prod(self.sizes)

    @property
    def dp(self) -> int:
        """Number of ranks that see different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def expert_shard(self) -> int:
        """Number of ranks along dp_shard that shard the same experts."""
        return self.dp_shard // self.ep

    def coordinates(self, rank: int) -> Coordinates:
        """Return the coordinates of `rank`."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank = {rank}: outside a world of {self.world_size} ranks")
        digits: list[int] = []
        for size in reversed(self.sizes):
            rank, digit = divmod(rank, size)
            digits.append(digit)
        return Coordinates(*reversed(digits))

    def rank(self, coordinates: Coordinates) -> int:
        """Return the rank at these coordinates."""
        rank = 0
        for size, digit in zip(self.sizes, coordinates, strict=True):
            if not 0 <= digit < size:
                raise ValueError(f"{coordinates}: outside {self}")
            rank = rank * size + digit
        return rank

    def dp_index(self, rank: int) -> int:
        """Return the slice of the global batch that `rank` works on, in 0 … dp - 1."""
        where = self.coordinates(rank)
        return where.dp_replicate * self.dp_shard + where.dp_shard

    def group(self, rank: int, *axes: str) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` only along `axes`, itself included, in order."""
        here = self.coordinates(rank)
        origin = self.rank(here._replace(**dict.fromkeys(axes, 0)))
        return tuple(origin + offset for offset in self._offsets(axes))

    def expert_group(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that share each layer's experts with `rank`, including itself."""
        along = self.group(rank, "dp_shard")
        first = along.index(rank) // self.ep * self.ep
        return along[first : first + self.ep]

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """Return all groups along `axes`: every rank is in exactly one."""
        within = self._offsets(axes)
        origins = self._offsets([axis for axis in AXES if axis not in axes])
        return [tuple(origin + offset for offset in within) for origin in origins]

    def _offsets(self, axes: Sequence[str]) -> list[int]:
        """Return the ranks at 0 along every other axis, in order."""
        offsets, stride = [0], self.world_size
        for axis, size in zip(AXES, self.sizes, strict=True):
            stride //= size
            if axis in axes:
                offsets = [offset + digit * stride for offset in offsets for digit in range(size)]
        return offsets

    def build_mesh(self, device_type: str) -> DeviceMesh:
        """Return the device mesh of the axes in use; needs a process group, real or fake."""
        from torch.distributed.device_mesh import init_device_mesh

        used = [(axis, size) for axis, size in zip(AXES, self.sizes, strict=True) if size > 1] or [
            ("dp_replicate", 1)
        ]
        names, sizes = zip(*used, strict=True)
        return init_device_mesh(device_type, sizes, mesh_dim_names=names)

    def __str__(self) -> str:
        used = [f"{axis}={size}" for axis, size in zip(AXES, self.sizes, strict=True) if size > 1]
        within = f" (ep={self.ep})" if self.ep > 1 else ""
        return (" × ".join(used) or "1 rank") + within


def _mismatch(world_size: int, sizes: dict[str, int], fixed: int, free: list[str]) -> Problem:
    product = " × ".join(f"{axis}={size}" for axis, size in sizes.items() if size != FREE)
    if free:
        return Problem(
            "world_size",
            f"not a multiple of {product} = {fixed}",
            f"start {_near_multiple(world_size, fixed)} ranks, or change the axes",
            world_size,
        )
    return Problem(
        "world_size",
        f"the layout {product} needs {fixed} ranks",
        f"start {fixed} ranks, or leave one axis free",
        world_size,
    )


def _divisors_of(whole: int) -> str:
    fitting = [str(n) for n in range(1, min(whole, 1024) + 1) if whole % n == 0]
    return " or ".join([", ".join(fitting[:-1]), fitting[-1]] if len(fitting) > 1 else fitting)


def _near_multiple(wanted: int, factor: int) -> str:
    if factor < 1:
        return "more"
    below = wanted // factor * factor
    return f"{below} or {below + factor}" if below else str(factor)

"""Muon with results that do not depend on the layout: one rank orthogonalises a whole matrix.

torch's Muon multiplies DTensors, and products over shards round differently, so on shards it trains
a different model. Here, momentum and update stay on the shards. In between, each round assigns as
many matrices as there are shards, one to each rank, which assembles its matrix, orthogonalises it
and sends every rank its part back. A rank never holds more than one whole matrix, and no work is
done twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim._muon import _adjust_lr

from drivetrain.parallel.parts import own_part

Box = tuple[int, int, int, int]
"""Part of a matrix: first row, number of rows, first column, number of columns."""


class Muon(torch.optim.Muon):
    """torch's Muon for matrices that may be sharded (fsdp, hsdp, tp).

    It takes the same steps on any layout. In bfloat16, on whole matrices, its steps equal torch's
    bit for bit. Its state has the same names as torch's.
    """

    dtype = torch.float32
    """Data type in which matrices are orthogonalised. bfloat16, which torch uses, is faster on
    accelerators but amplifies a gradient's last bits, so that the order of sums becomes visible."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform one optimization step. A collective call if parameters are sharded."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            for sharing, matrices in _rounds(trained):
                directions = [self._direction(matrix, group) for matrix in matrices]
                if sharing is not None:
                    directions = sharing.orthogonalize(
                        matrices, directions, self._iteration(group), self.dtype
                    )
                else:
                    directions = [self._iteration(group)(direction) for direction in directions]
                for matrix, direction in zip(matrices, directions, strict=True):
                    rate = _adjust_lr(group["lr"], group["adjust_lr_fn"], matrix.shape)
                    shard = own_part(matrix)
                    shard.mul_(1 - float(group["lr"]) * group["weight_decay"])
                    shard.add_(direction.to(shard.device), alpha=-float(rate))
        return loss

    def _direction(self, matrix: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        """Update the momentum of this rank's shard and return the direction of the step."""
        assert matrix.grad is not None  # noqa: S101 - step() takes no others
        state = self.state[matrix]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(matrix)
        gradient, momentum = own_part(matrix.grad), own_part(state["momentum_buffer"])
        momentum.lerp_(gradient, 1 - group["momentum"])
        return gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum

    def _iteration(self, group: dict[str, Any]) -> Callable[[torch.Tensor], torch.Tensor]:
        return partial(
            orthogonalized,
            coefficients=group["ns_coefficients"],
            num_steps=group["ns_steps"],
            eps=group["eps"],
            dtype=self.dtype,
        )


def orthogonalized(
    matrix: torch.Tensor,
    coefficients: tuple[float, float, float],
    num_steps: int,
    eps: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the matrix with singular values near one, by the Newton-Schulz iteration."""
    a, b, c = coefficients
    is_tall = matrix.size(0) > matrix.size(1)
    now = matrix.to(dtype)
    now = now.T if is_tall else now
    now = now / now.norm().clamp(min=eps)
    for _ in range(num_steps):
        gram = now @ now.T
        now = torch.addmm(now, torch.addmm(gram, gram, gram, beta=b, alpha=c), now, beta=a)
    return now.T if is_tall else now


def on_shards(optimizer: torch.optim.Optimizer) -> None:
    """Turn a torch Muon with sharded parameters into ours; state and settings stay."""
    groups = optimizer.param_groups
    has_shards = any(isinstance(p, DTensor) for group in groups for p in group["params"])
    if has_shards and type(optimizer) is torch.optim.Muon:
        optimizer.__class__ = Muon
        vars(optimizer)["dtype"] = torch.bfloat16  # as torch's has it on whole matrices


def _rounds(
    parameters: Sequence[torch.Tensor],
) -> Iterator[tuple[_ShardGroup | None, list[torch.Tensor]]]:
    """Yield the matrices of each round, largest first, so that those of a round are similar."""
    by_group: dict[_ShardGroup | None, list[torch.Tensor]] = {}
    for parameter in parameters:
        by_group.setdefault(_group_of(parameter), []).append(parameter)
    for sharing, matrices in by_group.items():
        matrices.sort(key=lambda matrix: -matrix.numel())  # stable: every rank has this order
        count = 1 if sharing is None else sharing.size
        for first in range(0, len(matrices), count):
            yield sharing, matrices[first : first + count]


_GROUPS: dict[tuple[DeviceMesh, tuple[int, ...]], _ShardGroup] = {}


def _group_of(parameter: torch.Tensor) -> _ShardGroup | None:
    """Return the ranks that share the parameter; None if this rank holds all of it."""
    if not isinstance(parameter, DTensor):
        return None
    mesh = parameter.device_mesh
    placed = enumerate(parameter.placements)
    axes = tuple(axis for axis, at in placed if not at.is_replicate() and mesh.size(axis) > 1)
    if not axes:
        return None
    if (mesh, axes) not in _GROUPS:
        _GROUPS[mesh, axes] = _ShardGroup(mesh, axes)
    return _GROUPS[mesh, axes]


class _ShardGroup:
    """The ranks that hold parts of the same matrices."""

    def __init__(self, mesh: DeviceMesh, axes: tuple[int, ...]) -> None:
        if len(axes) == 1:
            self._group = mesh.get_group(axes[0])
        else:
            along = mesh[tuple((mesh.mesh_dim_names or ())[axis] for axis in axes)]
            self._group = along._flatten().get_group()  # noqa: SLF001 - its only name
        self._axes = axes
        self.size = dist.get_world_size(self._group)
        self._rank = dist.get_rank(self._group)
        is_cpu = mesh.device_type == "cpu"
        # shards offloaded to host memory are still sent through the device
        self._device = torch.device(
            "cpu" if is_cpu else torch.accelerator.current_accelerator() or mesh.device_type
        )

    def orthogonalize(
        self,
        matrices: Sequence[torch.Tensor],
        directions: Sequence[torch.Tensor],
        iterate: Callable[[torch.Tensor], torch.Tensor],
        dtype: torch.dtype,
    ) -> list[torch.Tensor]:
        """Return this rank's parts of the orthogonalised matrices. A collective call."""
        # the iteration starts with this cast: half the bytes in bfloat16, with the same result
        parts = [d.to(self._device, dtype).reshape(-1) for d in directions]
        mine = self._rank if self._rank < len(matrices) else None
        theirs = [] if mine is None else self._boxes(matrices[mine])
        received = self._swap(dtype, parts, [rows * columns for _, rows, _, columns in theirs])
        answer: list[torch.Tensor] = []
        if mine is not None:
            whole = received[0].new_empty(matrices[mine].shape)
            for (row, rows, column, columns), part in zip(theirs, received, strict=True):
                whole[row : row + rows, column : column + columns] = part.view(rows, columns)
            whole = iterate(whole)
            answer = [
                whole[row : row + rows, column : column + columns].reshape(-1)
                for row, rows, column, columns in theirs
            ]
        returned = self._swap(dtype, answer, [part.numel() for part in parts])
        return [r.view(d.shape) for r, d in zip(returned, directions, strict=True)]

    def _swap(
        self, dtype: torch.dtype, parts: Sequence[torch.Tensor], sizes: Sequence[int]
    ) -> list[torch.Tensor]:
        """Send part i to rank i and receive `sizes[i]` numbers from it; missing entries are 0."""
        sent = [part.numel() for part in parts] + [0] * (self.size - len(parts))
        coming = [*sizes, *([0] * (self.size - len(sizes)))]
        given = torch.cat([*parts, torch.empty(0, dtype=dtype, device=self._device)])
        taken = torch.empty(sum(coming), dtype=dtype, device=self._device)
        dist.all_to_all_single(taken, given, coming, sent, group=self._group)
        return list(taken.split(coming))[: len(sizes)]

    def _boxes(self, matrix: torch.Tensor) -> tuple[Box, ...]:
        """Return each rank's part of the matrix."""
        assert isinstance(matrix, DTensor)  # noqa: S101 - for mypy
        sizes = tuple((axis, matrix.device_mesh.size(axis)) for axis in self._axes)
        found = _boxes(tuple(matrix.shape), matrix.placements, sizes)
        if found[self._rank][1::2] != tuple(own_part(matrix).shape):
            where = f"{matrix.placements} of {tuple(matrix.shape)}"
            raise RuntimeError(f"Muon does not support {where}")
        return found


@cache
def _boxes(
    shape: tuple[int, ...], placements: tuple[Any, ...], sizes: tuple[tuple[int, int], ...]
) -> tuple[Box, ...]:
    """Return the box of each rank along mesh axes of these sizes; the last axis varies fastest."""
    every = product(*(range(size) for _, size in sizes))
    return tuple(_box(shape, placements, sizes, at) for at in every)


def _box(
    shape: tuple[int, ...],
    placements: tuple[Any, ...],
    sizes: tuple[tuple[int, int], ...],
    at: tuple[int, ...],
) -> Box:
    """Return the box at these coordinates: torch's chunks along one mesh axis after another."""
    box: list[int] = []
    for dim, whole in enumerate(shape):
        cuts = [(axis, size, i) for (axis, size), i in zip(sizes, at, strict=True)]
        cuts = [cut for cut in cuts if placements[cut[0]].dim == dim]
        # fsdp shards last but comes first in the mesh: its placement is a strided one
        cuts.sort(key=lambda cut: not placements[cut[0]].is_shard())
        first, count = 0, whole
        for _, size, index in cuts:
            chunk = -(-count // size)
            skipped = min(index * chunk, count)
            first, count = first + skipped, min(chunk, count - skipped)
        box += [first, count]
    return (box[0], box[1], box[2], box[3])

"""How far Muon on shards is from Muon on whole matrices: python -m tests.ranks.muon FILE.md"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from drivetrain import Muon
from drivetrain.testing import run_ranks
from drivetrain.train.optimization.muon import _ShardGroup

STEPS = 20


class Matrices(nn.Module):
    """Rows that no number of ranks divides; of the last matrix a rank may have none."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.first = nn.Linear(48, 97, bias=False), nn.Linear(97, 34, bias=False)
        self.second, self.head = nn.Linear(34, 48, bias=False), nn.Linear(48, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(F.silu(self.first(F.silu(self.up(x)))))
        logits: torch.Tensor = self.head(F.silu(x))
        return logits


def weights_after(
    steps: int,
    model: nn.Module,
    optimizer: Callable[..., torch.optim.Optimizer],
    dtype: torch.dtype | None = None,
    **settings: Any,
) -> list[torch.Tensor]:
    """The same batches on every rank."""
    made: Any = optimizer(list(model.parameters()), lr=0.02, **settings)
    if dtype is not None:
        made.dtype = dtype
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(64, 48, generator=generator)
        labels = (x[:, :5] + 0.1 * torch.randn(64, 5, generator=generator)).argmax(1)
        F.cross_entropy(model(x), labels).backward()
        made.step()
        made.zero_grad()
    parameters = [parameter.detach() for parameter in model.parameters()]
    return [p.full_tensor() if isinstance(p, DTensor) else p.clone() for p in parameters]


def distance(ones: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> float:
    """Relative, of the matrix that is furthest."""
    pairs = zip(ones, others, strict=True)
    return max(float((one - other).norm() / other.norm()) for one, other in pairs)


def _fsdp(model: nn.Module) -> None:
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def _hsdp(model: nn.Module) -> None:
    names = ("replicate", "shard")
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=names)
    fully_shard(model, mesh=mesh)


def _fsdp_and_tp(model: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"])


LAYOUTS: dict[int, dict[str, Callable[[nn.Module], None]]] = {
    3: {"fsdp": _fsdp},
    4: {"fsdp": _fsdp, "hsdp": _hsdp, "fsdp × tp": _fsdp_and_tp},
}


def distances(world_size: int) -> dict[str, tuple[float, float, float]]:
    """By layout: torch's own, ours in bfloat16, ours; each from itself on whole matrices."""
    torch.manual_seed(0)
    model = Matrices()
    kinds: list[tuple[Any, torch.dtype | None]] = [
        (torch.optim.Muon, None),
        (Muon, torch.bfloat16),
        (Muon, None),
    ]
    whole = [weights_after(STEPS, copy.deepcopy(model), *kind) for kind in kinds]
    found = {}
    for name, shard in LAYOUTS[world_size].items():
        of_kind = []
        for kind, expected in zip(kinds, whole, strict=True):
            shards = copy.deepcopy(model)
            shard(shards)
            of_kind.append(distance(weights_after(STEPS, shards, *kind), expected))
        found[name] = (of_kind[0], of_kind[1], of_kind[2])
    return found


class Twins(nn.Module):
    """Two matrices of one shape, so that mistaking one for the other goes unnoticed by shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(48, 48, bias=False), nn.Linear(48, 48, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.other(F.silu(self.one(x)))
        return logits


def _wrong_owner(original: Any) -> Any:
    """Each owner's answer is taken for the other's matrix."""

    def orthogonalize(*args: Any) -> list[torch.Tensor]:
        return list(reversed(original(*args)))

    return orthogonalize


def distances_with_wrong_owners() -> tuple[float, float]:
    """Muon on shards from Muon on whole matrices: as it is, and with that mistake planted."""
    torch.manual_seed(0)
    model = Twins()
    whole = weights_after(2, copy.deepcopy(model), Muon)
    original = _ShardGroup.orthogonalize
    found = []
    for orthogonalize in (original, _wrong_owner(original)):
        shards = copy.deepcopy(model)
        _fsdp(shards)
        with patch.object(_ShardGroup, "orthogonalize", orthogonalize):
            found.append(distance(weights_after(2, shards, Muon), whole))
    return found[0], found[1]


def main(target: Path) -> None:
    lines = ["| layout | ranks | torch.optim.Muon | drivetrain.Muon, bf16 | drivetrain.Muon |"]
    lines += ["| --- | ---: | ---: | ---: | ---: |"]
    for ranks in LAYOUTS:
        for name, values in run_ranks(distances, ranks, 600, args=(ranks,))[0].items():
            shown = " | ".join(f"{value:.1e}" if value else "0" for value in values)
            lines.append(f"| {name} | {ranks} | {shown} |")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("\n".join(lines) + "\n")
    print(target.read_text())


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Sentinel: compare the copies of a model bit for bit, every so many steps.

Each parameter's raw bits are summed as integers, which is exact in any order, and any flipped bit
changes the sum. The copies compare one number over all parameters; only if it differs do they
exchange the sums, which identify the parameter and the rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from drivetrain.config.schema import RunConfig
from drivetrain.core.errors import ReplicaDrift
from drivetrain.parallel.world import World

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Sentinel:
    """Compares the copies along `dp_replicate`, whose ranks hold the same part of the model."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup, every_steps: int) -> None:
        self._parameters = dict(model.named_parameters())
        self._group = group
        self._every_steps = every_steps
        self._agreed_at: int | None = None

    @classmethod
    def of(cls, config: RunConfig, world: World, model: nn.Module) -> Sentinel | None:
        """Return None if there is nothing to compare."""
        every = config.sentinel.every_steps
        if every is None or world.mesh is None or world.layout.dp_replicate == 1:
            return None
        if not config.parallel.traits.keeps_copies_equal:
            return None
        return cls(model, world.mesh.get_group("dp_replicate"), every)

    def after_step(self, step: int) -> None:
        """Check if it is due; `step` counts from 1."""
        if self._agreed_at is None:  # copies start from the same seed, or the same checkpoint
            self._agreed_at = step - 1
        if step % self._every_steps == 0:
            self.check(step)

    def check(self, step: int) -> None:
        """Raise ReplicaDrift unless all copies are equal. A collective call."""
        sums = bit_sums(self._parameters.values())
        digest = _digest(sums)
        extremes = torch.stack((digest, ~digest))  # ~ reverses the order without overflow
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=self._group)
        most, inverted_least = extremes.tolist()
        if most == ~inverted_least:
            self._agreed_at = step
            return
        raise ReplicaDrift(self._verdict(sums, step))

    def _verdict(self, sums: torch.Tensor, step: int) -> str:
        ranks = dist.get_process_group_ranks(self._group)
        gathered = [torch.empty_like(sums) for _ in ranks]
        dist.all_gather(gathered, sums, group=self._group)
        by_rank = dict(zip(ranks, (each.tolist() for each in gathered), strict=True))
        drifts = find_drifts(list(self._parameters), by_rank)
        more = f" (and {len(drifts) - 1} more parameters)" if len(drifts) > 1 else ""
        return (
            f"sentinel: after step {step} the copies of {drifts[0].parameter}{more} are not the "
            f"same: {_who(drifts[0].ranks, ranks)}; look for code that changes weights on some "
            f"ranks only, or a faulty device there, and {where_from(self._agreed_at)}"
        )


def where_from(agreed_at: int | None) -> str:
    """Return where to start again; a checkpoint is named only if the run can have one."""
    if not agreed_at:
        return "then start the run anew: no earlier step of it was checked"
    return f"resume from a checkpoint of step {agreed_at} or earlier: until then they agreed"


@dataclass(frozen=True)
class Drift:
    """A parameter whose copies differ, and the ranks in the minority (all without a majority)."""

    parameter: str
    ranks: tuple[int, ...]


def find_drifts(names: Sequence[str], by_rank: Mapping[int, Sequence[int]]) -> list[Drift]:
    """Return every parameter that is not the same on all ranks. Pure."""
    drifts = []
    for index, name in enumerate(names):
        values = {rank: sums[index] for rank, sums in by_rank.items()}
        (usual, votes), *others = Counter(values.values()).most_common()
        if others:
            has_majority = votes > len(values) / 2
            odd = [rank for rank, value in values.items() if value != usual or not has_majority]
            drifts.append(Drift(name, tuple(odd)))
    return drifts


def bit_sums(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the sum of each tensor's raw bits; of a sharded one, of this rank's part."""
    return torch.stack([bit_sum(tensor.detach()) for tensor in tensors])


def bit_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bit sum of a tensor, or of this rank's part of it."""
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    per_word = 8 // local.element_size()
    if not local.is_contiguous() or local.storage_offset() % per_word:
        local = local.clone(memory_format=torch.contiguous_format)
    flat = local.view(-1)
    # eight bytes at a time is several times as fast; the rest element by element
    words = flat.numel() // per_word * per_word
    rest = flat[words:].view(_INTEGERS[flat.element_size()])
    return flat[:words].view(torch.int64).sum() + rest.sum(dtype=torch.int64)


def _digest(sums: torch.Tensor) -> torch.Tensor:
    """Combine the sums, each times a different odd number, so that any single change shows."""
    return (sums * (2 * torch.arange(len(sums), device=sums.device) + 1)).sum()


def _who(odd: Sequence[int], ranks: Sequence[int]) -> str:
    if len(odd) == len(ranks):
        return f"ranks {_listed(ranks)} differ, and it is unknown which of them is right"
    rest = [rank for rank in ranks if rank not in odd]
    many = len(odd) > 1
    return f"rank{'s' * many} {_listed(odd)} differ{'s' * (not many)} from ranks {_listed(rest)}"


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))

"""Remove other ranks' parts from a model, in place; the rest keeps the user's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from drivetrain.config.schema import Pipeline
from drivetrain.core.errors import ConfigError
from drivetrain.parallel.pipeline import schedules
from drivetrain.parallel.pipeline.anatomy import (
    Anatomy,
    anatomy_of,
    balanced_stages,
    stages_at,
    stages_of_rank,
    tied_weights,
)
from drivetrain.parallel.pipeline.stage import Absent, Carry, Chunk


@dataclass(frozen=True)
class Cut:
    """One rank's stages of a model."""

    chunks: tuple[Chunk, ...]
    carry: Carry
    num_stages: int
    owners: tuple[int, ...]
    """The rank along pp of each stage."""


def cut_model(
    model: nn.Module,
    config: Pipeline,
    rank: int,
    num_ranks: int,
    costs: Mapping[str, float] | None = None,
) -> Cut:
    """Keep only the part of `rank` along pp; `costs` by module name (default: weights)."""
    anatomy = anatomy_of(model)
    num_stages = schedules.num_stages(config, num_ranks)
    stages = _stages(model, anatomy, config, num_stages, costs or {})
    _refuse_tied(model, anatomy, stages)
    is_v = schedules.SCHEDULES[config.schedule].is_v
    own = stages_of_rank(rank, num_ranks, num_stages, is_v=is_v)
    carry = Carry()
    chunks = [_chunk(model, anatomy, stages[index], index, num_stages) for index in own]
    _remove_others(model, anatomy, chunks, carry)
    _note_others(model, anatomy, chunks)
    owners = [0] * num_stages
    for other in range(num_ranks):
        for stage in stages_of_rank(other, num_ranks, num_stages, is_v=is_v):
            owners[stage] = other
    return Cut(tuple(chunks), carry, num_stages, tuple(owners))


def _stages(
    model: nn.Module,
    anatomy: Anatomy,
    config: Pipeline,
    num_stages: int,
    costs: Mapping[str, float],
) -> list[range]:
    if config.split_points:
        return stages_at(anatomy, config.split_points, num_stages)

    def cost(name: str) -> float:
        weights = sum(p.numel() for p in model.get_submodule(name).parameters())
        return costs.get(name, float(weights))

    ends = (sum(map(cost, anatomy.front)), sum(map(cost, anatomy.back)))
    return balanced_stages([cost(block) for block in anatomy.blocks], ends, num_stages)


def _refuse_tied(model: nn.Module, anatomy: Anatomy, stages: list[range]) -> None:
    parts = [[anatomy.blocks[i] for i in stage] for stage in stages]
    parts[0] += anatomy.front
    parts[-1] += anatomy.back
    problems = tied_weights(model, parts)
    if problems:
        raise ConfigError(problems[:3])


def _chunk(model: nn.Module, anatomy: Anatomy, blocks: range, index: int, num_stages: int) -> Chunk:
    containers: dict[nn.Module, dict[str, nn.Module | None]] = {}
    for name in anatomy.blocks:  # also ModuleLists of which this stage has no block
        containers.setdefault(model.get_submodule(name.rpartition(".")[0]), {})
    modules = []
    for name in (anatomy.blocks[i] for i in blocks):
        parent, _, key = name.rpartition(".")
        module = model.get_submodule(name)
        containers[model.get_submodule(parent)][key] = module
        modules.append(module)
    pieces = list(anatomy.front) if index == 0 else []
    pieces += list(anatomy.back) if index == num_stages - 1 else []
    return Chunk(index, containers, modules, [model.get_submodule(name) for name in pieces])


def _note_others(model: nn.Module, anatomy: Anatomy, chunks: list[Chunk]) -> None:
    """Note for each stage the parts that this rank has for its other stages."""
    for name in (*anatomy.front, *anatomy.back):
        parent, _, key = name.rpartition(".")
        holder, piece = model.get_submodule(parent), model.get_submodule(name)
        for chunk in chunks:
            if piece not in chunk.pieces and not isinstance(piece, Absent):
                chunk.others.append((holder, key))


def _remove_others(model: nn.Module, anatomy: Anatomy, chunks: list[Chunk], carry: Carry) -> None:
    kept = {module for chunk in chunks for module in (*chunk.pieces, *chunk.blocks)}
    for name in (*anatomy.front, *anatomy.back, *anatomy.blocks):
        if model.get_submodule(name) in kept:
            continue
        parent, _, key = name.rpartition(".")
        if name in anatomy.blocks:
            delattr(model.get_submodule(parent), key)  # not del: that would renumber the blocks
        else:
            setattr(model.get_submodule(parent), key, Absent(carry))

"""The parts of a model for a pipeline: what each costs, and which stage gets it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn

from drivetrain.core.errors import ConfigError, Problem
from drivetrain.parallel.accelerator import accelerator_of
from drivetrain.parallel.blocks import repeated_blocks

# A model for a pipeline: the modules before its repeated blocks, the blocks, the modules after.


@dataclass(frozen=True)
class Anatomy:
    """Names of the modules that have weights, in the order they are registered."""

    front: tuple[str, ...]
    blocks: tuple[str, ...]
    back: tuple[str, ...]


def anatomy_of(model: nn.Module) -> Anatomy:
    """Return the parts of a model; raise ConfigError if it cannot be split this way."""
    blocks = repeated_blocks(model)
    names = {module: name for name, module in model.named_modules()}
    if not blocks:
        raise _refused("the model has no repeated blocks", "keep its layers in a ModuleList")
    block_names = tuple(names[block] for block in blocks)
    front: list[str] = []
    back: list[str] = []
    seen_blocks = 0

    def visit(module: nn.Module, prefix: str) -> None:
        nonlocal seen_blocks
        for name, _ in module.named_parameters(recurse=False):
            raise _refused(
                f"the weight {prefix}{name} is not in a module that one stage can hold",
                "move it into its own module, before or after the blocks",
            )
        for name, child in module.named_children():
            path = f"{prefix}{name}"
            if path in block_names:
                seen_blocks += 1
            elif any(block.startswith(f"{path}.") for block in block_names):
                visit(child, f"{path}.")
            elif next(child.parameters(), None) is not None:
                if 0 < seen_blocks < len(blocks):
                    raise _refused(f"{path} is between the blocks", "make it part of a block")
                (back if seen_blocks else front).append(path)

    visit(model, "")
    return Anatomy(tuple(front), block_names, tuple(back))


def tied_weights(model: nn.Module, parts: Sequence[Sequence[str]]) -> list[Problem]:
    """Return a problem for each weight that two stages share: each would train its own copy."""
    owner: dict[int, tuple[int, str]] = {}
    problems = []
    for stage, modules in enumerate(parts):
        for module in modules:
            for name, weight in model.get_submodule(module).named_parameters():
                first, other = owner.setdefault(id(weight), (stage, f"{module}.{name}"))
                if first != stage:
                    problems.append(
                        Problem(
                            "parallel.pp",
                            f"{module}.{name} is the same weight as {other}, on another rank",
                            "untie them (Hugging Face: tie_word_embeddings=False)",
                            has_value=False,
                        )
                    )
    return problems


def _refused(rule: str, remedy: str) -> ConfigError:
    return ConfigError([Problem("parallel.pp", rule, remedy, has_value=False)])


# Which blocks form which stage, and which rank has it. Pure arithmetic on names and costs.

_KEY = "parallel.pipeline.split_points"


def stages_at(anatomy: Anatomy, points: Sequence[str], num_stages: int) -> list[range]:
    """Return the blocks of each stage, split at the named blocks."""
    unknown = [point for point in points if point not in anatomy.blocks[1:]]
    if unknown:
        known = ", ".join(anatomy.blocks[1:])
        raise ConfigError(
            [Problem(_KEY, "no block has this name", f"use {known}", p) for p in unknown]
        )
    if len(points) != num_stages - 1:
        rule = f"makes {len(points) + 1} stages, but the schedule needs {num_stages}"
        raise ConfigError([Problem(_KEY, rule, f"name {num_stages - 1} blocks", tuple(points))])
    starts = [0, *sorted(anatomy.blocks.index(point) for point in points), len(anatomy.blocks)]
    return [range(a, b) for a, b in pairwise(starts)]


def balanced_stages(costs: Sequence[float], ends: tuple[float, float], num: int) -> list[range]:
    """Return contiguous blocks per stage that minimize the cost of the most expensive stage.

    `costs`: per block; `ends`: extra costs of the first and the last stage.
    """
    count = len(costs)
    if num > count:
        rule = f"{num} stages need at least one block each, but the model has {count}"
        raise ConfigError([Problem("parallel.pp", rule, "use fewer ranks or stages", num)])

    before = [0.0, *accumulate(costs)]

    def cost(start: int, stop: int) -> float:
        extra = (ends[0] if start == 0 else 0.0) + (ends[1] if stop == count else 0.0)
        return before[stop] - before[start] + extra

    @cache
    def best(start: int, stages: int) -> tuple[float, tuple[int, ...]]:
        if stages == 1:
            return cost(start, count), (count,)
        return min(
            (max(cost(start, stop), rest), (stop, *stops))
            for stop in range(start + 1, count - stages + 2)
            for rest, stops in [best(stop, stages - 1)]
        )

    stops = best(0, num)[1]
    return [range(a, b) for a, b in pairwise((0, *stops))]


def stages_of_rank(rank: int, num_ranks: int, num_stages: int, *, is_v: bool) -> list[int]:
    """Return a rank's stages: round-robin, or for a V schedule one on the way there and back."""
    if not is_v:
        return list(range(rank, num_stages, num_ranks))
    return [rank, num_stages - 1 - rank]


# The measured cost of each part of a model, to balance the stages.

_WARM_UP, _TIMED = 1, 3


def part_costs(model: nn.Module, call: Callable[[nn.Module], Any]) -> dict[str, float]:
    """Return forward seconds by module name; `call` runs a micro-batch through the model."""
    anatomy = anatomy_of(model)
    device = next(model.parameters()).device
    began: dict[str, float] = {}
    spent: dict[str, float] = {}

    def start(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            began[name] = time.perf_counter()

        return hook

    def stop(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            accelerator_of(device).synchronize()
            spent[name] = spent.get(name, 0.0) + time.perf_counter() - began[name]

        return hook

    handles = []
    for name in (*anatomy.front, *anatomy.blocks, *anatomy.back):
        module = model.get_submodule(name)
        handles.append(module.register_forward_pre_hook(start(name)))
        handles.append(module.register_forward_hook(stop(name)))
    was_training = model.training
    model.eval()  # so that running statistics do not change
    try:
        with torch.no_grad():
            for turn in range(_WARM_UP + _TIMED):
                if turn == _WARM_UP:
                    spent.clear()
                call(model)
    finally:
        model.train(was_training)
        for handle in handles:
            handle.remove()
    return spent

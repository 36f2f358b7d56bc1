"""Per-sample outputs of a model, gathered on rank 0 in the data's order.

For metrics that are not means over samples (AUROC, BLEU) and for predictions. Batches are the same
at any number of ranks, so the gathered outputs are too. Rank 0 holds all of them in memory.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from drivetrain.core.errors import ConfigError, Problem, blame
from drivetrain.parallel.world import World

_ONE_EACH = "return a tensor whose first dimension counts the samples, or a list with one for each"


@dataclass(frozen=True)
class PerSample:
    """One value per sample, as rows of a tensor or a list; returned by `Task.metrics`.

    The values are not averaged: `Task.summarize` gets those of all samples together.
    """

    values: torch.Tensor | Sequence[Any]


@dataclass
class Collected:
    """Outputs of this rank's batches, kept in host memory."""

    turns: list[tuple[int, Any]] = field(default_factory=list)

    def add(self, turn: int, outputs: Any, num_samples: int, what: str) -> None:
        """Add a batch's outputs: tensors and lists, or dicts and tuples of these."""
        for leaf in pytree.tree_leaves(outputs, is_leaf=_is_list):
            _check_rows(leaf, num_samples, what)
        self.turns.append((turn, pytree.tree_map_only(torch.Tensor, _to_host, outputs)))

    def in_order(self, world: World) -> Any:
        """Return all samples' outputs on rank 0, None elsewhere. A collective call."""
        parts = [self.turns]
        if world.mesh is not None:
            parts = [[] for _ in range(world.layout.world_size)] if world.is_main else []
            dist.gather_object(self.turns, parts or None, dst=0, group=world.host_group)
        if not world.is_main:
            return None
        # the n-th batches of all ranks are adjacent in the data, in the order of the ranks
        ordered = sorted(
            ((turn, rank, outputs) for rank, part in enumerate(parts) for turn, outputs in part),
            key=lambda each: each[:2],
        )
        batches = [outputs for _, _, outputs in ordered]
        return _joined(batches) if batches else None


def summarized(summarize: Any, outputs: Any, world: World) -> dict[str, float]:
    """Return the result of `Task.summarize`, computed on rank 0. A collective call."""
    text = ""
    if world.is_main:
        try:
            text = json.dumps(_numbers(_applied(summarize, outputs)))
        except Exception as error:
            blame(error, "Task.summarize")
            raise
    found: dict[str, float] = json.loads(world.agree(text))
    return found


def _applied(summarize: Any, outputs: Any) -> Any:
    if not (hasattr(summarize, "update") and hasattr(summarize, "compute")):
        return summarize(outputs)
    metric = copy.deepcopy(summarize)  # of torchmetrics: what it has seen so far does not count
    for each in metric.values() if hasattr(metric, "values") else (metric,):
        # it sees every sample; the other ranks compute nothing, so it must not wait for them
        each.distributed_available_fn = lambda: False
    metric.reset()
    metric.update(**outputs)
    found = metric.compute()
    return found if isinstance(found, Mapping) else {type(metric).__name__: found}


def _numbers(found: Any) -> dict[str, float]:
    if not isinstance(found, Mapping):
        rule, remedy = "must return a dict of names and numbers", 'return {"auroc": value}'
        raise ConfigError([Problem("summarize", rule, remedy, type(found).__name__)])
    for name, value in found.items():
        if isinstance(value, torch.Tensor) and value.numel() != 1:
            rule, remedy = "is not a single number", "return one number for each name"
            raise ConfigError(
                [Problem(f"summarize[{name!r}]", rule, remedy, tuple(value.shape))],
            )
    return {str(name): float(value) for name, value in found.items()}


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu()


def _check_rows(leaf: Any, num_samples: int, what: str) -> None:
    if isinstance(leaf, torch.Tensor):
        rows = leaf.shape[0] if leaf.dim() else 0
    elif isinstance(leaf, list):
        rows = len(leaf)
    else:
        rule = "is neither a tensor nor a list"
        raise ConfigError([Problem(what, rule, _ONE_EACH, type(leaf).__name__)])
    if rows != num_samples:
        rule = f"has {rows} values for {num_samples} samples"
        raise ConfigError([Problem(what, rule, _ONE_EACH, has_value=False)])


def _joined(batches: Sequence[Any]) -> Any:
    """Concatenate batches: one tensor if all rows have one shape, else a list of rows."""
    leaves = [pytree.tree_flatten(batch, is_leaf=_is_list) for batch in batches]
    columns = zip(*(flat for flat, _ in leaves), strict=True)
    return pytree.tree_unflatten([_end_to_end(column) for column in columns], leaves[0][1])


def _end_to_end(column: Sequence[Any]) -> Any:
    shapes = {part.shape[1:] if isinstance(part, torch.Tensor) else None for part in column}
    if len(shapes) == 1 and None not in shapes:
        return torch.cat(list(column))
    return [row for part in column for row in part]

"""tp: the sharding plan, its checks, and how it is applied to a model."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from drivetrain.config.schema import Tensor
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.parallel.blocks import repeated_blocks, with_hidden
from drivetrain.parallel.expert.finding import find_experts, matches
from drivetrain.parallel.loss_parallel import stay_in_parts
from drivetrain.parallel.parts import whole

# Where a tensor-parallel plan comes from, and whether it fits the model.
#
# A plan gives for each layer how its weight is sharded: `colwise` (by outputs; the next layer gets
# a part of the features), `rowwise` (by inputs, which are such a part; the results are summed),
# `colwise_gather` (by outputs, which are gathered: the last layer), `embedding` (by the rows of
# its table). In names, `*` stands for a number.

STYLES = ("colwise", "rowwise", "colwise_gather", "embedding", "replicate")
# Hugging Face's names
_SAME_AS = {
    "colwise_gather_output": "colwise_gather",
    "colwise_rep": "colwise_gather",
    "embedding_rowwise": "embedding",
    "local_colwise": "colwise",
    "local_rowwise": "rowwise",
}
_KEY = "parallel.tensor.plan"
# attributes under which attention modules and configs keep the number of their heads
_HEADS = ("heads", "num_heads", "n_head", "num_attention_heads", "num_key_value_heads")


@dataclass(frozen=True)
class ShardedLayer:
    """One layer and how it is sharded."""

    name: str
    style: str


def plan_for(model: nn.Module, said: str | tuple[str, ...], num_ranks: int) -> list[ShardedLayer]:
    """Return the sharded layers; ConfigError if there is no plan or it does not fit."""
    plan = _spoken(said) if not isinstance(said, str) else _found(model, said)
    modules = dict(model.named_modules())
    experts = [each.name for each in find_experts(model)]
    # tp does not shard experts, even if the model's plan names them
    plan = {pattern: word for pattern, word in plan.items() if not _is_of(pattern, experts)}
    cuts: list[ShardedLayer] = []
    problems: list[Problem] = []
    for pattern, word in plan.items():
        style = _SAME_AS.get(word, word)
        if style not in STYLES:
            problems.append(Problem(_KEY, f"{pattern} has an unknown style", _ways(), style))
            continue
        named = [name for name in modules if matches(name, pattern)]
        if not named:
            problems.append(Problem(_KEY, "no module has this name", _names(modules), pattern))
        cuts += [ShardedLayer(name, style) for name in named if style != "replicate"]
    problems = [*_head_problems(model, num_ranks), *problems]
    problems += [p for cut in cuts for p in _size_problems(cut, modules[cut.name], num_ranks)]
    if problems:
        raise ConfigError(problems[:5])
    return cuts


def _is_of(pattern: str, modules: list[str]) -> bool:
    """True if a line of a plan names one of these modules, or one of their weights."""
    meant = (pattern, pattern.rpartition(".")[0])
    return any(matches(module, name) for module in modules for name in meant)


def _spoken(lines: tuple[str, ...]) -> dict[str, str]:
    wrong = [line for line in lines if "=" not in line]
    if wrong:
        remedy = "write module=colwise"
        raise ConfigError(
            [Problem(_KEY, "is not a line of a plan", remedy, line) for line in wrong]
        )
    return dict(line.split("=", 1) for line in lines)


def _found(model: nn.Module, said: str) -> Mapping[str, str]:
    if ":" in said:
        module, _, name = said.partition(":")
        try:
            made: Mapping[str, str] = getattr(importlib.import_module(module), name)(model)
        except (ImportError, AttributeError) as error:
            problem = Problem(_KEY, f"cannot be loaded ({error})", "write module:function", said)
            raise ConfigError([problem]) from error
        return made
    plan = dict(getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None) or {})
    if said != "model" or not plan:
        rule = f"{type(model).__name__} has no tp_plan"
        remedy = "give it a `tp_plan` dict, or set this to module:function or to a list"
        raise ConfigError([Problem(_KEY, rule, remedy, said)])
    return plan


def _size_problems(cut: ShardedLayer, module: nn.Module, num_ranks: int) -> list[Problem]:
    if isinstance(module, nn.Embedding) and cut.style == "embedding":
        size, side = module.num_embeddings, "rows"
    elif isinstance(module, nn.Linear) and cut.style == "rowwise":
        size, side = module.in_features, "inputs"
    elif isinstance(module, nn.Linear) and cut.style != "embedding":
        size, side = module.out_features, "outputs"
    else:
        kind = type(module).__name__
        remedy = "shard nn.Linear and nn.Embedding only, or leave this module out"
        rule = f"{cut.name} is a {kind}, which cannot be sharded in this style"
        return [Problem(_KEY, rule, remedy, cut.style)]
    if size % num_ranks == 0:
        return []
    return [
        Problem(
            "parallel.tp",
            f"does not divide the {size} {side} of {cut.name}",
            f"use {_divisors(size)}",
            num_ranks,
        )
    ]


def _head_problems(model: nn.Module, num_ranks: int) -> list[Problem]:
    """Check that tp divides the numbers of heads: a head is never split."""
    seen: dict[str, int] = {}
    for thing in (getattr(model, "config", None), *model.modules()):
        for name in _HEADS:
            value: Any = getattr(thing, name, None)
            if isinstance(value, int) and value % num_ranks:
                seen[name] = value
    return [
        Problem(
            "parallel.tp",
            f"does not divide the model's {value} {name}",
            f"use {_divisors(value)}",
            num_ranks,
        )
        for name, value in seen.items()
    ]


def _divisors(size: int) -> str:
    fitting = [str(n) for n in range(1, min(size, 64) + 1) if size % n == 0]
    return " or ".join([", ".join(fitting[:-1]), fitting[-1]] if len(fitting) > 1 else fitting)


def _ways() -> str:
    return f"use {', '.join(STYLES[:-1])} or {STYLES[-1]}"


def _names(modules: Mapping[str, nn.Module]) -> str:
    linear = [re.sub(r"\b\d+\b", "*", n) for n, m in modules.items() if isinstance(m, nn.Linear)]
    return f"the linear layers are {', '.join(dict.fromkeys(linear))}"


# tp: each layer is sharded over several ranks (DTensor, `parallelize_module`).
#
# With sequence parallelism each rank keeps only its part of the sequence between sharded layers:
# it is gathered before a sharded layer, and the output of a rowwise layer is scattered again.

_SEQUENCE = 1  # batch, sequence, features
_WHOLE, _IN_PARTS = Replicate(), Shard(_SEQUENCE)


def share_layers(model: nn.Module, config: Tensor, mesh: DeviceMesh) -> None:
    """Shard the layers of a model, in place, over the ranks of a one-axis mesh."""
    cuts = plan_for(model, config.plan, mesh.size())
    styles: dict[str, ParallelStyle] = {
        cut.name: _style(cut, config, is_last=cut.style == "colwise_gather") for cut in cuts
    }
    if config.sequence_parallel:
        styles |= _between(model, cuts, mesh)
    for name, style in styles.items():
        parallelize_module(model.get_submodule(name), mesh, style)


def _style(cut: ShardedLayer, config: Tensor, *, is_last: bool) -> ParallelStyle:
    parts = config.sequence_parallel
    if cut.style == "embedding":
        return RowwiseParallel(input_layouts=_WHOLE)
    if cut.style == "rowwise":
        return RowwiseParallel(output_layouts=_IN_PARTS if parts else _WHOLE)
    if is_last:
        return _LastLayer(in_parts=parts, stays_cut=config.loss_parallel)
    return ColwiseParallel()


class _LastLayer(ColwiseParallel):
    """Gathers the logits, or keeps them as DTensors in training for loss parallelism."""

    def __init__(self, *, in_parts: bool, stays_cut: bool) -> None:
        super().__init__(
            input_layouts=_IN_PARTS if in_parts else _WHOLE,
            output_layouts=Shard(-1) if stays_cut else _WHOLE,
            use_local_output=not stays_cut,
        )
        self._stays_cut = stays_cut

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = super()._apply(module, device_mesh)
        if self._stays_cut:
            module.register_forward_hook(_in_parts_while_training)
        return module


def _in_parts_while_training(module: nn.Module, inputs: Any, output: Any) -> Any:  # noqa: ARG001
    """Keep logits sharded in training; in evaluation, the user's metrics get a plain tensor."""
    return stay_in_parts(output) if module.training else whole(output)


def _between(
    model: nn.Module, cuts: list[ShardedLayer], mesh: DeviceMesh
) -> dict[str, ParallelStyle]:
    """Split the sequence before the blocks and in norms; gather it for sharded layers."""
    blocks = repeated_blocks(model)
    names = {module: name for name, module in model.named_modules()}
    if not blocks:
        rule = "the model has no repeated blocks, which sequence parallelism needs"
        key = "parallel.tensor.sequence_parallel"
        raise ConfigError([Problem(key, rule, "set it to false", value=True)])
    if find_experts(model):  # tokens would be routed in parts, and nothing would sum the results
        rule = "a model's experts need whole sequences"
        key = "parallel.tensor.sequence_parallel"
        raise ConfigError([Problem(key, rule, "set it to false", value=True)])
    prefixes = [f"{names[block]}." for block in blocks]
    blocks[0].register_forward_pre_hook(_Laid(mesh, _WHOLE, _IN_PARTS), with_kwargs=True)
    gathered: set[str] = set()
    for cut in cuts:
        prefix = next((p for p in prefixes if cut.name.startswith(p)), None)
        if cut.style == "colwise" and prefix is not None:
            # the layer itself, or its child of the block: code in between relies on the length of
            # the whole sequence
            child = cut.name.removeprefix(prefix).split(".")[0]
            gathered.add(prefix + child)
    for name in sorted(gathered):
        whole_first = _Laid(mesh, _IN_PARTS, _WHOLE)
        model.get_submodule(name).register_forward_pre_hook(whole_first, with_kwargs=True)
    return {
        name: SequenceParallel(sequence_dim=_SEQUENCE, use_local_output=True)
        for name, module in model.named_modules()
        if _is_norm(module) and (name.startswith(tuple(prefixes)) or _follows(name, model, blocks))
    }


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower() and next(module.children(), None) is None


def _follows(name: str, model: nn.Module, blocks: list[nn.Module]) -> bool:
    """True if a module is registered after the blocks: the final norm."""
    order = [module for _, module in model.named_modules()]
    return order.index(model.get_submodule(name)) > order.index(blocks[-1])


class _Laid:
    """Forward pre-hook that redistributes a module's hidden state over the ranks."""

    def __init__(self, mesh: DeviceMesh, before: Placement, after: Placement) -> None:
        self._mesh = mesh
        self._before, self._after = before, after

    def __call__(self, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return with_hidden(args, kwargs, self._lay)

    def _lay(self, hidden: torch.Tensor) -> torch.Tensor:
        length, ranks = hidden.shape[_SEQUENCE], self._mesh.size()
        if self._after == _IN_PARTS and length % ranks:
            rule = f"a sequence of length {length} cannot be split evenly by tp = {ranks}"
            remedy = f"pad sequences to a multiple of {ranks}, or set it to false"
            key = "parallel.tensor.sequence_parallel"
            raise ConfigError([Problem(key, rule, remedy, value=True)])
        shared = DTensor.from_local(hidden, self._mesh, [self._before], run_check=False)
        return shared.redistribute(placements=[self._after]).to_local()

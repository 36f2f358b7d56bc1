"""tp: each layer is shared by several ranks (DTensor, `parallelize_module`).

With sequence parallelism each rank keeps, between the layers that are cut, only its part of the
sequence: what comes before a cut layer is put together again, what a rowwise layer gives is handed
out in parts.
"""

from __future__ import annotations

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
from drivetrain.parallel.parts import whole
from drivetrain.parallel.tensor.loss_parallel import stay_in_parts
from drivetrain.parallel.tensor.plan import Cut, plan_for

_SEQUENCE = 1  # batch, sequence, features
_WHOLE, _IN_PARTS = Replicate(), Shard(_SEQUENCE)


def share_layers(model: nn.Module, config: Tensor, mesh: DeviceMesh) -> None:
    """Cut the layers of a model, in place, for the ranks of a one-axis mesh."""
    cuts = plan_for(model, config.plan, mesh.size())
    styles: dict[str, ParallelStyle] = {
        cut.name: _style(cut, config, is_last=cut.style == "colwise_gather") for cut in cuts
    }
    if config.sequence_parallel:
        styles |= _between(model, cuts, mesh)
    for name, style in styles.items():
        parallelize_module(model.get_submodule(name), mesh, style)


def _style(cut: Cut, config: Tensor, *, is_last: bool) -> ParallelStyle:
    parts = config.sequence_parallel
    if cut.style == "embedding":
        return RowwiseParallel(input_layouts=_WHOLE)
    if cut.style == "rowwise":
        return RowwiseParallel(output_layouts=_IN_PARTS if parts else _WHOLE)
    if is_last:
        return _LastLayer(in_parts=parts, stays_cut=config.loss_parallel)
    return ColwiseParallel()


class _LastLayer(ColwiseParallel):
    """Whole logits; or, for a loss that is computed over parts, DTensors while training."""

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
    """Metrics are the user's own code, and see a plain tensor."""
    return stay_in_parts(output) if module.training else whole(output)


def _between(model: nn.Module, cuts: list[Cut], mesh: DeviceMesh) -> dict[str, ParallelStyle]:
    """Norms work on a part of the sequence; blocks begin with one; cut layers see all of it."""
    blocks = repeated_blocks(model)
    names = {module: name for name, module in model.named_modules()}
    if not blocks:
        rule = "the model has no repeated blocks to keep a sequence's parts between"
        key = "parallel.tensor.sequence_parallel"
        raise ConfigError([Problem(key, rule, "set it to false", value=True)])
    prefixes = [f"{names[block]}." for block in blocks]
    blocks[0].register_forward_pre_hook(_Laid(mesh, _WHOLE, _IN_PARTS), with_kwargs=True)
    gathered: set[str] = set()
    for cut in cuts:
        prefix = next((p for p in prefixes if cut.name.startswith(p)), None)
        if cut.style == "colwise" and prefix is not None:
            # the layer itself, or the part of the block it belongs to: code in between counts on
            # the sequence's length
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
    """Whether a module is registered after the blocks: the final norm."""
    order = [module for _, module in model.named_modules()]
    return order.index(model.get_submodule(name)) > order.index(blocks[-1])


class _Laid:
    """Hands a module its hidden state laid out in another way over the ranks."""

    def __init__(self, mesh: DeviceMesh, before: Placement, after: Placement) -> None:
        self._mesh = mesh
        self._before, self._after = before, after

    def __call__(self, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return with_hidden(args, kwargs, self._lay)

    def _lay(self, hidden: torch.Tensor) -> torch.Tensor:
        length, ranks = hidden.shape[_SEQUENCE], self._mesh.size()
        if self._after == _IN_PARTS and length % ranks:
            rule = f"a sequence of {length} cannot be shared evenly by tp = {ranks}"
            remedy = f"pad sequences to a multiple of {ranks}, or set it to false"
            key = "parallel.tensor.sequence_parallel"
            raise ConfigError([Problem(key, rule, remedy, value=True)])
        shared = DTensor.from_local(hidden, self._mesh, [self._before], run_check=False)
        return shared.redistribute(placements=[self._after]).to_local()

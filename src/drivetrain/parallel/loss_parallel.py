"""Cross-entropy over sharded logits; every other function gets them gathered.

Inside torch's loss_parallel() the backward of log_softmax is the identity, because torch fuses it
into that of the following cross-entropy. A log_softmax without one (a KL divergence, distillation)
would silently train wrongly. So loss_parallel() is entered only inside F.cross_entropy, once for
its forward and once for its backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from drivetrain.core.errors import ConfigError, Problem
from drivetrain.parallel.parts import whole

Function = Callable[..., Any]
_MARK = "_is_logits_in_parts"
_LOOKS = {
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "__len__"),
    *("is_floating_point", "is_complex", "is_contiguous", "get_device", "__hash__", "__repr__"),
    *("register_hook", "retain_grad", "requires_grad_"),
}
"""Functions that read a tensor's properties, not its values."""
_ONLY_MOVES = {"contiguous", "float", "double", "half", "bfloat16", "transpose", "permute"}


def stay_in_parts(logits: torch.Tensor) -> torch.Tensor:
    """Mark a last layer's output, so that only a cross-entropy gets it sharded."""
    if isinstance(logits, DTensor):
        setattr(logits, _MARK, True)
    return logits


class LossOverParts(TorchFunctionMode):
    """Wraps a loss and its model, and handles functions that are called with sharded logits."""

    def __torch_function__(
        self,
        func: Function,
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Called instead of every torch function."""
        kwargs = kwargs or {}
        if func is F.cross_entropy:
            loss = _cross_entropy(*args, **kwargs)
            if loss is not None:
                return loss
        if not _has_parts((*args, *kwargs.values())):
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in _LOOKS:
            return func(*args, **kwargs)
        if name == "__get__" or _keeps_vocabulary(name, args, kwargs):
            return _marked_or_whole(func(*args, **kwargs))
        if _is_in_place(name, kwargs):
            rule = f"the loss changes the logits in place ({name}), but they are sharded"
            remedy = "write x = x.div(2), not x.div_(2), or set it to false"
            raise ConfigError([Problem("parallel.tensor.loss_parallel", rule, remedy, value=True)])
        args, kwargs = tree_map_only(DTensor, _whole_if_in_parts, (args, kwargs))
        return func(*args, **kwargs)


def _is_in_parts(value: Any) -> bool:
    return isinstance(value, DTensor) and hasattr(value, _MARK)


def _whole_if_in_parts(tensor: DTensor) -> torch.Tensor:
    return whole(tensor) if _is_in_parts(tensor) else tensor


def _has_parts(values: Iterable[Any]) -> bool:
    """True if a value is sharded logits. Called very often, so it searches only one level."""
    return any(
        any(map(_is_in_parts, value)) if isinstance(value, (list, tuple)) else _is_in_parts(value)
        for value in values
    )


def _marked_or_whole(result: Any) -> Any:
    if not isinstance(result, DTensor):
        return result
    is_cut = any(isinstance(placement, Shard) for placement in result.placements)
    return stay_in_parts(result) if is_cut else whole(result)


def _keeps_vocabulary(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """True if a function only changes the layout or dtype and keeps each row of logits."""
    logits, *rest = args
    if kwargs or not _is_in_parts(logits):
        return False
    if name == "__getitem__":
        index = rest[0] if isinstance(rest[0], tuple) else (rest[0],)
        return all(part is None or isinstance(part, (int, slice, type(...))) for part in index)
    if name == "to":
        return all(isinstance(each, torch.dtype) for each in rest)
    return name in _ONLY_MOVES or _keeps_last_dim(name, logits, rest)


def _keeps_last_dim(name: str, logits: DTensor, rest: Sequence[Any]) -> bool:
    last = logits.dim() - 1
    if logits.placements != (Shard(last),):
        return False
    if name == "flatten":
        return len(rest) == 2 and rest[1] % logits.dim() < last
    if name in ("view", "reshape"):
        sizes = rest[0] if isinstance(rest[0], (tuple, list)) else rest
        return bool(sizes[-1] == logits.shape[-1])
    return False


def _is_in_place(name: str, kwargs: Mapping[str, Any]) -> bool:
    is_method = name.endswith("_") and not name.endswith("__")
    is_operator = name.startswith("__i") and name not in ("__invert__", "__index__", "__int__")
    return is_method or is_operator or name == "__setitem__" or "out" in kwargs


def _cross_entropy(
    input: Any,  # noqa: A002 - as torch has it
    target: Any,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor | None:
    """Return the loss as a plain tensor; None if torch cannot compute it over sharded logits.

    torch can for class indices without weights, on logits that are sharded along the classes.
    """
    is_plain = weight is None and size_average is None and reduce is None and not label_smoothing
    if not is_plain or not isinstance(input, DTensor) or isinstance(target, DTensor):
        return None
    logits = input
    is_cut = logits.placements == (Shard(1 if logits.dim() > 1 else 0),)
    if not is_cut or target.is_floating_point():
        return None
    options = {"ignore_index": ignore_index, "reduction": reduction}
    compute: Function = _CrossEntropy.apply
    loss: torch.Tensor = compute(logits.to_local(), logits, target, options)
    return loss


class _CrossEntropy(torch.autograd.Function):
    """torch's cross-entropy, with a separate graph that runs only inside loss_parallel()."""

    @staticmethod
    def forward(
        ctx: Any,
        part: torch.Tensor,
        logits: DTensor,
        target: torch.Tensor,
        options: Mapping[str, Any],
    ) -> torch.Tensor:
        with torch.set_grad_enabled(ctx.needs_input_grad[0]), loss_parallel():
            own = part.detach().requires_grad_(ctx.needs_input_grad[0])
            again = DTensor.from_local(own, logits.device_mesh, logits.placements, run_check=False)
            loss: torch.Tensor = whole(F.cross_entropy(again, target, **options))
        ctx.graph = loss, own
        return loss.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        loss, own = ctx.graph
        with loss_parallel():
            (gradient,) = torch.autograd.grad(loss, own, gradients)
        return gradient, None, None, None

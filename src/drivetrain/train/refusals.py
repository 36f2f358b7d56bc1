"""Checks of what a task provides: errors that name the remedy, before torch's own errors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from drivetrain.config.provenance import ResolvedConfig
from drivetrain.config.schema import RunConfig
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.core.requirements import comes_from
from drivetrain.parallel.model import ParallelModel
from drivetrain.train.outputs import PerSample
from drivetrain.train.task import Task, Total

_MEAN_OR_TOTAL = "return the mean over the batch's samples, or Total(sum, count)"

_PREPARE = (
    "call prepare(model, optimizer, train, config, stateful=…, scheduler=…); validation data goes "
    "to loop.evaluate(val, metrics)"
)


def check_loss(loss: Any) -> None:
    """ConfigError unless the loss is a real scalar tensor that depends on weights, or a Total.

    A pair of a loss and a dict of its parts is valid too.
    """
    if isinstance(loss, tuple):
        if len(loss) != 2 or not isinstance(loss[1], Mapping):
            rule, remedy = "is a tuple", 'return the loss, or (loss, {"name": part})'
            raise _refusal("loss", rule, remedy, f"{len(loss)} values")
        check_metrics(loss[1], "loss parts")
        loss = loss[0]
    value = loss.sum if isinstance(loss, Total) else loss
    if not isinstance(value, torch.Tensor):
        raise _refusal("loss", "is not a tensor", _remedy_for(value), _kind(value))
    if value.numel() != 1:
        rule = f"has {value.numel()} elements"
        remedy = "return its mean(), or Total(loss.sum(), len(loss))"
        raise _refusal("loss", rule, remedy, tuple(value.shape))
    if not value.is_floating_point():
        rule = "is not a real floating-point number"
        raise _refusal("loss", rule, _MEAN_OR_TOTAL, str(value.dtype))
    if torch.is_grad_enabled() and not value.requires_grad:
        rule = "does not depend on any trainable weight"
        remedy = "compute it from model(batch), without .item(), .detach() or torch.no_grad()"
        raise ConfigError([Problem("loss", rule, remedy, has_value=False)])


def check_metrics(found: Any, where: str = "metrics") -> None:
    """ConfigError unless each name has a number, a tensor of one element or a Total."""
    if not isinstance(found, Mapping):
        raise _refusal(where, "is not a dict of names and values", _MEAN_OR_TOTAL, _kind(found))
    for name, value in found.items():
        if isinstance(value, PerSample) and where == "metrics":
            continue
        number = value.sum if isinstance(value, Total) else value
        num_elements = number.numel() if isinstance(number, torch.Tensor) else 1
        if num_elements != 1 or not isinstance(number, (int, float, torch.Tensor)):
            what = tuple(number.shape) if isinstance(number, torch.Tensor) else _kind(number)
            raise _refusal(f"{where}[{name!r}]", "is not a single number", _MEAN_OR_TOTAL, what)
        if where == "metrics" and not isinstance(value, Total) and _is_whole(number):
            rule = "is a whole number, and a mean over samples would not be"
            remedy = f"for a count, return Total({name}, len(batch)); for a mean, a float"
            raise _refusal(f"{where}[{name!r}]", rule, remedy, number)


def _is_whole(number: Any) -> bool:
    if isinstance(number, torch.Tensor):
        return not (number.is_floating_point() or number.is_complex())
    return isinstance(number, int)


def check_kept(kept: Mapping[str, Any], task: Task) -> None:
    """ConfigError if there are PerSample values without `summarize`, or the reverse."""
    if kept and task.summarize is None:
        rule = "is a PerSample, but the task has no summarize"
        remedy = "give Task a summarize, or return a mean"
        name = f"metrics[{next(iter(kept))!r}]"
        raise ConfigError([Problem(name, rule, remedy, has_value=False)])
    if task.summarize is not None and not kept and task.adapter is None:
        rule = "has no input: metrics returns no PerSample"
        remedy = 'let Task.metrics return one, like {"preds": PerSample(scores)}'
        raise ConfigError([Problem("summarize", rule, remedy, has_value=False)])


def checked(make: Callable[[], Any]) -> Callable[[], nn.Module]:
    """Wrap the function that builds the model: ConfigError if it returns something else."""

    def made() -> nn.Module:
        model = make()
        if not isinstance(model, nn.Module):
            rule = "is not a torch.nn.Module"
            remedy = "return the model from the function that builds it"
            raise _refusal("model", rule, remedy, _kind(model))
        check_undistributed(model)
        return model

    return made


_WRAPPERS = (
    "deepspeed.runtime.engine",
    "torch.distributed.fsdp",
    "torch.nn.parallel.data_parallel",
    "torch.nn.parallel.distributed",
)
"""Modules of classes that divide a model's work among ranks."""


def check_undistributed(model: nn.Module) -> None:
    """ConfigError if another library divides its work among the ranks, which this run will do."""
    for name, module in model.named_modules():
        if any(kind.__module__.startswith(_WRAPPERS) for kind in type(module).__mro__):
            rule = "is distributed already, and gradients would be summed twice, in any order"
            remedy = "pass the plain module, without accelerator.prepare or DistributedDataParallel"
            raise _refusal(f"model.{name}".rstrip("."), rule, remedy, _kind(module))


def check_model(model: nn.Module, num_ranks: int) -> None:
    """ConfigError for models that cannot be trained with any strategy."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        rule, remedy = "has no trainable weights", "keep requires_grad=True for some"
        raise _refusal("model", rule, remedy, type(model).__name__)
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) is True and isinstance(
            module, (nn.Embedding, nn.EmbeddingBag)
        ):
            rule = "its gradients would be sparse, which cannot be summed, clipped or saved here"
            raise _refusal("model", rule, "create it with sparse=False", name or "the model itself")
    for name, parameter in model.named_parameters():
        if parameter.is_complex() and num_ranks > 1:
            rule = "is complex, but gradients are summed over ranks as real numbers"
            remedy = "keep it as a real parameter of shape (…, 2) and use torch.view_as_complex"
            raise _refusal("model", rule, remedy, name)


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """ConfigError if its step needs a closure, which would recompute the loss on all ranks."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        rule = "its step needs a closure that computes the loss again"
        remedy = "use one that steps on gradients alone: AdamW, SGD"
        raise _refusal("optimizer", rule, remedy, type(optimizer).__name__)


def check_prepared(model: Any, optimizer: Any, train: Any, config: Any, stateful: Any) -> None:
    """ConfigError if an argument of `prepare` is in the wrong place; libraries differ in order."""
    optimizers = (torch.optim.Optimizer, list, tuple, Mapping, type(None))
    trained = (nn.Module, torch.optim.Optimizer, LRScheduler)
    configs = (RunConfig, ResolvedConfig, Mapping)
    is_model = callable(model) or isinstance(model, Mapping)
    places = (
        ("model", model, is_model, "is not a model"),
        ("optimizer", optimizer, isinstance(optimizer, optimizers), "is not a torch optimizer"),
        ("train", train, not isinstance(train, trained), "is not data"),
        ("config", config, isinstance(config, configs), "is not a config"),
        (
            "stateful",
            stateful,
            isinstance(stateful or {}, Mapping),
            "is not a dict of objects to save",
        ),
    )
    wrong = [
        Problem(at, rule, _PREPARE, _kind(x)) for at, x, is_right, rule in places if not is_right
    ]
    if wrong:
        raise ConfigError(wrong)


def check_plain(**given: Any) -> None:
    """ConfigError for what Accelerate has prepared: it would be divided among the ranks twice.

    Its scheduler steps once per process, and its DataLoader yields every n-th batch.
    """
    for where, value in given.items():
        several = value.values() if isinstance(value, Mapping) else value
        for one in several if isinstance(value, (Mapping, list, tuple)) else [value]:
            if comes_from("accelerate", one):
                rule = "comes from accelerator.prepare, which divides the work among the ranks"
                remedy = f"pass the {'dataset or DataLoader' if where == 'train' else where} itself"
                raise _refusal(where, rule, remedy, _kind(one))


def why_not_gathered(config: RunConfig, spread: ParallelModel) -> Problem | None:
    """Return why `gather()` cannot be used in this run, or None if it can."""
    parallel, where, value, rule = config.parallel, "", "", ""
    if parallel.pp > 1:
        where, value = "parallel.pp", str(parallel.pp)
        rule = "only a pipeline's last stage has the loss, one micro-batch at a time"
    elif parallel.cp > 1:
        where, value = "parallel.cp", str(parallel.cp)
        rule = "with cp a rank has only a part of each sample, so no sample's features"
    elif config.fault_tolerance == "live":
        where, value = "fault_tolerance", "live"
        rule = "each live replica computes its own loss"
    elif spread.local_steps is not None:
        where, value = "parallel.strategy", parallel.strategy
        rule = "its ranks train separate models between synchronizations"
    elif config.reproducibility == "bitwise":
        where, value = "reproducibility", "bitwise"
        rule = "its gradients would be summed in an order that depends on the number of ranks"
    if not rule:
        return None
    return Problem(
        where,
        f"gather() cannot be used: {rule}",
        "remove gather() from the loss, or change this",
        value,
    )


def _refusal(where: str, rule: str, remedy: str, value: Any) -> ConfigError:
    return ConfigError([Problem(where, rule, remedy, value)])


def _kind(value: Any) -> str:
    return "None" if value is None else type(value).__name__


def _remedy_for(value: Any) -> str:
    if isinstance(value, dict):
        key = "loss" if "loss" in value else next(iter(value), "loss")
        return f"return one of its values, like found[{key!r}]"
    if isinstance(getattr(value, "loss", None), torch.Tensor):
        return "return its loss: model(**batch).loss"
    if isinstance(value, (int, float)):
        return "return the tensor itself, without .item() or float()"
    return _MEAN_OR_TOTAL

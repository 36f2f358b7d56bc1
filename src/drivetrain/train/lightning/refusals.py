"""Which parts of a LightningModule are supported; others are refused, with an alternative."""

from __future__ import annotations

import inspect
from typing import Any

from drivetrain.core.errors import ConfigError, Problem

CALLED = {
    "configure_optimizers",
    "forward",
    "on_before_optimizer_step",
    "on_fit_end",
    "on_fit_start",
    "on_train_batch_end",
    "on_train_batch_start",
    "on_train_end",
    "on_train_epoch_end",
    "on_train_epoch_start",
    "on_train_start",
    "on_validation_end",
    "on_validation_epoch_end",
    "on_validation_epoch_start",
    "on_validation_start",
    "prepare_data",
    "setup",
    "train_dataloader",
    "training_step",
    "val_dataloader",
    "validation_step",
}
"""Methods that a module may override and that are called."""

_OWN_LOOP = "write your own loop with drivetrain.prepare"
_COLLATE = "do it in the dataset or in the loader's collate_fn"
_STATEFUL = "pass Trainer(..., stateful={...}): objects with a state_dict are saved with the run"
REFUSED = {
    "backward": _OWN_LOOP,
    "configure_callbacks": "pass hooks to Trainer: docs/hooks.md lists the equivalents",
    "configure_gradient_clipping": "set optimization.max_grad_norm",
    "configure_model": "create the layers in __init__; for sharding, pass the class or a function",
    "configure_sharded_model": "create the layers in __init__",
    "lr_scheduler_step": "return a scheduler with its own step()",
    "on_after_backward": "use on_before_optimizer_step",
    "on_after_batch_transfer": _COLLATE,
    "on_before_backward": "put it at the end of training_step",
    "on_before_batch_transfer": _COLLATE,
    "on_before_zero_grad": "use on_before_optimizer_step, or on_train_batch_end",
    "on_load_checkpoint": _STATEFUL,
    "on_save_checkpoint": _STATEFUL,
    "on_validation_batch_end": "put it at the end of validation_step",
    "on_validation_batch_start": "put it at the beginning of validation_step",
    "on_validation_model_eval": "submodules that you set to eval mode stay in it",
    "on_validation_model_train": "submodules that you set to eval mode stay in it",
    "on_validation_model_zero_grad": "use on_validation_start",
    "optimizer_step": _OWN_LOOP,
    "optimizer_zero_grad": "gradients are cleared after each step",
    "teardown": "use on_fit_end",
    "transfer_batch_to_device": "return tensors, or dicts, lists and tuples of them",
}
"""Methods that are not called here, and what to do instead."""

OF_NO_CONCERN = {
    "all_gather",
    "clip_gradients",
    "example_input_array",
    "freeze",
    "load_from_checkpoint",
    "log",
    "log_dict",
    "lr_schedulers",
    "manual_backward",
    "optimizers",
    "predict_dataloader",
    "predict_step",
    "print",
    "remove_ignored_hparams",
    "save_hyperparameters",
    "test_dataloader",
    "test_step",
    "to_onnx",
    "to_tensorrt",
    "to_torchscript",
    "toggle_optimizer",
    "toggled_optimizer",
    "unfreeze",
    "untoggle_optimizer",
}
"""Methods that Lightning's `fit` does not call either, and hooks of its other loops."""


def base_of(kind: type) -> type | None:
    """Return Lightning's base class of a user's class, from either of its packages."""
    for each in kind.__mro__:
        is_lightnings = each.__module__.partition(".")[0] in ("lightning", "pytorch_lightning")
        if is_lightnings and each.__name__ == "LightningModule":
            return each
    return None


def overrides(kind: type, name: str) -> bool:
    """True if the user's class overrides a method."""
    return getattr(kind, name, None) is not getattr(base_of(kind), name, None)


def check_module(module: Any) -> None:
    """ConfigError that lists everything the module uses that is not supported."""
    kind = type(module)
    base = base_of(kind)
    if base is None:
        rule, remedy = "is not a LightningModule", "use Task(model=…, loss=…)"
        raise ConfigError([Problem("from_lightning", rule, remedy, kind.__name__)])
    problems = [
        Problem(f"{kind.__name__}.{name}", "is not called here", remedy, has_value=False)
        for name, remedy in REFUSED.items()
        if hasattr(base, name) and overrides(kind, name)
    ]
    if not module.automatic_optimization:
        rule = "manual optimization steps optimizers from inside training_step"
        remedy = "write your own loop: drivetrain.prepare takes several models"
        where = f"{kind.__name__}.automatic_optimization"
        problems.append(Problem(where, rule, remedy, False))
    for name in ("training_step", "configure_optimizers"):
        if not overrides(kind, name):
            rule, remedy = "is missing", "define it: training calls it"
            problems.append(Problem(f"{kind.__name__}.{name}", rule, remedy, has_value=False))
    for name in ("training_step", "validation_step"):
        problems += _step_problems(kind, name)
    if problems:
        raise ConfigError(problems)


def _step_problems(kind: type, name: str) -> list[Problem]:
    needed = [
        parameter.name
        for parameter in list(inspect.signature(getattr(kind, name)).parameters.values())[1:]
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if "dataloader_iter" in needed or len(needed) > 2:
        rule = f"takes {', '.join(needed)}, but gets only batch and batch_idx here"
        remedy = (
            "pass several validation sets to fit() as a dict; declare dataloader_idx=0 as optional"
        )
        return [Problem(f"{kind.__name__}.{name}", rule, remedy, has_value=False)]
    return []

"""Hugging Face's TrainingArguments as Drivetrain config keys: a table, and a converter based on it.

This module does not import transformers; the arguments passed in come from it. A test compares the
table with the fields of the installed version, so that new fields are noticed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from drivetrain.config.provenance import ConvertedConfig
from drivetrain.core.errors import ConfigError, Problem

_Converter = Callable[[Any, Any], Mapping[str, Any]]


def _to(key: str) -> tuple[str, _Converter]:
    """Return the entry for a field that is copied to `key`, unless its value is None."""
    return f"`{key}`", lambda value, _: {} if value is None else {key: value}


def _steps(key: str) -> _Converter:
    def convert(value: Any, _: Any) -> Mapping[str, Any]:
        if 0 < value < 1:
            rule = "is a fraction of the run"
            raise ConfigError([Problem(key, rule, "give a number of steps", value)])
        return {key: int(value)}

    return convert


def _batch(value: int, args: Any) -> Mapping[str, Any]:
    return {
        "global_batch_size": value * args.gradient_accumulation_steps,
        "micro_batch_size": value,
    }


def _epochs(value: float, args: Any) -> Mapping[str, Any]:
    if args.max_steps > 0:
        return {}
    if value != int(value):
        rule = "ends in the middle of an epoch"
        raise ConfigError([Problem("num_train_epochs", rule, "use max_steps", value)])
    return {"num_train_epochs": int(value)}


_SHAPES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "inverse_sqrt": "inverse_sqrt",
}


def _shape(value: Any, _: Any) -> Mapping[str, Any]:
    name = getattr(value, "value", value)
    if name not in _SHAPES:
        remedy = f"use one of {', '.join(_SHAPES)}, or Task(schedule=…) with transformers' own"
        raise ConfigError([Problem("lr_scheduler_type", "has no counterpart", remedy, name)])
    return {"optimization.lr_scheduler_type": _SHAPES[name]}


def _warmup(value: float, _: Any) -> Mapping[str, Any]:
    if 0 < value < 1:
        return {"optimization.warmup_ratio": value}
    return {"optimization.warmup_steps": int(value)}


_OPTIMIZERS = {"adamw_torch": "for_loop", "adamw_torch_fused": "fused"}


def _optim(value: Any, _: Any) -> Mapping[str, Any]:
    name = getattr(value, "value", value)
    if name not in _OPTIMIZERS:
        remedy = f"use {' or '.join(_OPTIMIZERS)}, or create it in Task(optimizer=…)"
        raise ConfigError([Problem("optim", "has no counterpart", remedy, name)])
    return {"optimization.adamw_implementation": _OPTIMIZERS[name]}


def _evaluation(value: Any, args: Any) -> Mapping[str, Any]:
    if getattr(value, "value", value) != "steps":
        return {}
    return _steps("evaluation.every_steps")(args.eval_steps or args.logging_steps, args)


def _saving(value: Any, args: Any) -> Mapping[str, Any]:
    name = getattr(value, "value", value)
    if name == "epoch":
        remedy = 'use "steps"; or "no", and set checkpoint.every_steps'
        raise ConfigError([Problem("save_strategy", "has no counterpart", remedy, name)])
    if name == "steps":
        return _steps("checkpoint.every_steps")(args.save_steps, args)
    return {"checkpoint.every_steps": None}


def _best(value: str | None, args: Any) -> Mapping[str, Any]:
    wanted = args.load_best_model_at_end or getattr(args.save_strategy, "value", "") == "best"
    if value is None or not wanted:
        return {}
    mode = "max" if args.greater_is_better else "min"
    name = value.removeprefix("eval_")
    return {"checkpoint.keep_best": name, "checkpoint.keep_best_mode": mode}


def _sinks(value: Any, _: Any) -> Mapping[str, Any]:
    names = [value] if isinstance(value, str) else list(value or [])
    known = {"tensorboard", "mlflow", "wandb", "none"}
    if unknown := sorted(set(names) - known):
        remedy = "use tensorboard, mlflow, wandb or none"
        raise ConfigError([Problem("report_to", "is not a sink", remedy, unknown[0])])
    return {"record.sinks": [name for name in names if name != "none"]}


def _switch(key: str, on: Any) -> tuple[str, _Converter]:
    return f"`{key}: {on}`", lambda value, _: {key: on} if value else {}


KEYS: dict[str, tuple[str, _Converter]] = {
    "bf16": _switch("precision.dtype", "bf16"),
    "dataloader_num_workers": _to("data.num_workers"),
    "dataloader_pin_memory": ("`data.pin_memory`, if there is a device", lambda _, __: {}),
    "dataloader_prefetch_factor": _to("data.prefetch_factor"),
    "ddp_bucket_cap_mb": _to("parallel.ddp.bucket_cap_mb"),
    "ddp_find_unused_parameters": _to("parallel.ddp.find_unused_parameters"),
    "ddp_static_graph": _to("parallel.ddp.static_graph"),
    "ddp_timeout": _to("parallel.timeout_s"),
    "deepspeed": (
        "`parallel.strategy: deepspeed` and `parallel.deepspeed.config`",
        lambda value, _: (
            {"parallel.strategy": "deepspeed", "parallel.deepspeed.config": value} if value else {}
        ),
    ),
    "disable_tqdm": _switch("record.progress", "plain"),
    "eval_steps": ("`evaluation.every_steps`", lambda _, __: {}),
    "eval_strategy": (
        "`steps`: `evaluation.every_steps`; `epoch`: its default; "
        "`no`: pass no validation data to `fit`",
        _evaluation,
    ),
    "fp16": _switch("precision.dtype", "fp16"),
    "fsdp": _switch("parallel.strategy", "fsdp"),
    "gradient_accumulation_steps": ("included in `global_batch_size`", lambda _, __: {}),
    "gradient_checkpointing": _switch("memory.activation_checkpointing", "full"),
    "greater_is_better": ("`checkpoint.keep_best_mode`", lambda _, __: {}),
    "learning_rate": _to("optimization.learning_rate"),
    "load_best_model_at_end": (
        "`checkpoint.keep_best`; the best weights are in best.pt, the last in weights.pt",
        lambda _, __: {},
    ),
    "logging_steps": ("`record.logging_steps`", _steps("record.logging_steps")),
    "lr_scheduler_type": (
        "`optimization.lr_scheduler_type`; the warm-up starts one step above 0",
        _shape,
    ),
    "max_grad_norm": (
        "`optimization.max_grad_norm`",
        lambda value, _: {"optimization.max_grad_norm": value or None},
    ),
    "max_steps": ("`max_steps`", lambda value, _: {"max_steps": value} if value > 0 else {}),
    "metric_for_best_model": ("`checkpoint.keep_best`, without `eval_`", _best),
    "num_train_epochs": ("`num_train_epochs`", _epochs),
    "optim": ("`optimization.adamw_implementation`; others in `Task(optimizer=…)`", _optim),
    "output_dir": _to("output_dir"),
    "per_device_eval_batch_size": _to("evaluation.batch_size"),
    "per_device_train_batch_size": (
        "`micro_batch_size`; times accumulation steps and devices: `global_batch_size`",
        _batch,
    ),
    "report_to": ("`record.sinks`", _sinks),
    "run_name": _to("name"),
    "save_only_model": _switch("checkpoint.contents", "weights"),
    "save_steps": ("`checkpoint.every_steps`", lambda _, __: {}),
    "save_strategy": ("`checkpoint.every_steps`; `no`: `null`; `best`: `keep_best`", _saving),
    "save_total_limit": _to("checkpoint.keep_last"),
    "seed": _to("seed"),
    "tf32": _to("precision.tf32"),
    "torch_compile": _switch("compile.enabled", True),
    "torch_compile_backend": _to("compile.backend"),
    "torch_compile_mode": _to("compile.mode"),
    "warmup_steps": ("`optimization.warmup_steps`; below 1: `warmup_ratio`", _warmup),
    "weight_decay": _to("optimization.weight_decay"),
}
"""A field, the config key it maps to, and the function that converts its value."""

NOT_NEEDED = {
    "average_tokens_across_devices": "return `Total(sum, num_tokens)` from the loss",
    "bf16_full_eval": "evaluation runs in the run's own precision",
    "data_seed": "`seed` determines the order, at any number of ranks",
    "dataloader_in_order": "batches are always in order",
    "dataloader_persistent_workers": "workers persist for the whole run",
    "ddp_backend": "chosen by device",
    "ddp_broadcast_buffers": "the first replica's running statistics are saved and evaluated",
    "do_eval": "pass validation data to `fit`, or omit it",
    "do_predict": "`trainer.predict`",
    "do_train": "`trainer.fit`",
    "eval_accumulation_steps": "outputs are moved to the host batch by batch",
    "eval_do_concat_batches": "`PerSample` values are concatenated",
    "eval_use_gather_object": "tensors and lists are both gathered",
    "fp16_full_eval": "evaluation runs in the run's own precision",
    "ignore_data_skip": "a resumed run continues where it stopped, without rereading earlier data",
    "include_num_input_tokens_seen": "`Total` counts tokens, and tokens/s is shown",
    "local_rank": "known from the launcher",
    "log_level": "`logging.getLogger('drivetrain')`",
    "log_level_replica": "`record.log_ranks`",
    "log_on_each_node": "`record.log_ranks`",
    "logging_nan_inf_filter": "a NaN or infinite loss ends the run, and the error names its origin",
    "prediction_loss_only": "`Task.metrics` returns the metrics you want",
    "remove_unused_columns": "the dataset, or its collate_fn, yields the model's inputs",
    "restore_callback_states_from_checkpoint": "hooks with a `state_dict` are always restored",
    "resume_from_checkpoint": "the same command with `--run-dir` resumes",
    "save_on_each_node": "every rank writes its own shards",
    "skip_memory_metrics": "memory is recorded every `record.system_every_s` seconds",
    "use_cpu": "devices are used if there are any",
}
"""A field, and why it is not needed."""

_OWN_OPTIMIZER = "create the optimizer in `Task(optimizer=…)`"
_HUB = "push what `checkpoint export` writes"
_IN_MODEL = "set it up in the function that builds the model"
NOT_THERE = {
    "accelerator_config": "Drivetrain does not use Accelerate",
    "adam_beta1": _OWN_OPTIMIZER,
    "adam_beta2": _OWN_OPTIMIZER,
    "adam_epsilon": _OWN_OPTIMIZER,
    "auto_find_batch_size": "`drivetrain plan` finds one before the run",
    "batch_eval_metrics": "`Task.metrics` is called for each batch",
    "dataloader_drop_last": "every sample counts; the last step of an epoch is smaller",
    "dataloader_multiprocessing_context": "pass a DataLoader that has it",
    "debug": "`drivetrain diagnose`, and the report of a NaN or infinite loss",
    "enable_jit_checkpoint": "SIGTERM saves and exits with code 75",
    "eval_delay": "set `evaluation.every_steps`",
    "eval_on_start": "call `loop.evaluate` before the loop",
    "fsdp_config": "`parallel.fsdp.*`",
    "full_determinism": "closest is `reproducibility: bitwise`: one result at any ddp size",
    "gradient_checkpointing_kwargs": "recomputation is always non-reentrant",
    "hub_always_push": _HUB,
    "hub_model_id": _HUB,
    "hub_private_repo": _HUB,
    "hub_revision": _HUB,
    "hub_strategy": _HUB,
    "hub_token": _HUB,
    "include_for_metrics": "`Task.metrics` receives the whole batch",
    "label_names": "the loss reads the batch itself",
    "label_smoothing_factor": "in the loss: `cross_entropy(label_smoothing=…)`",
    "length_column_name": "pass a DataLoader with a batch sampler",
    "liger_kernel_config": _IN_MODEL,
    "logging_first_step": "set `record.logging_steps: 1`",
    "logging_strategy": "`record.logging_steps`",
    "lr_scheduler_kwargs": "`Task(schedule=…)` with transformers' own scheduler",
    "neftune_noise_alpha": "add it in the model",
    "optim_args": _OWN_OPTIMIZER,
    "optim_target_modules": _OWN_OPTIMIZER,
    "parallelism_config": "`parallel.tp`, `parallel.cp`, `parallel.pp`",
    "project": "`record.wandb.project`, `record.mlflow.experiment`",
    "push_to_hub": _HUB,
    "torch_empty_cache_steps": "call it in a hook",
    "trackio_bucket_id": "write your own sink: docs/extending.md",
    "trackio_space_id": "write your own sink: docs/extending.md",
    "trackio_static_space_id": "write your own sink: docs/extending.md",
    "train_sampling_strategy": "pass a DataLoader with your own sampler",
    "use_cache": _IN_MODEL,
    "use_liger_kernel": _IN_MODEL,
}
"""A field that is refused if it is set, and what to do instead."""

CALLBACKS = {
    "on_epoch_begin": "`on_train_epoch_start`",
    "on_epoch_end": "`on_train_epoch_end`",
    "on_evaluate": "`on_validation_end`, with the metrics",
    "on_init_end": "the constructor of the hook",
    "on_log": "`on_log`, with the steps since the last one",
    "on_optimizer_step": "`on_train_batch_end`: gradients are already cleared by then",
    "on_pre_optimizer_step": "`on_before_optimizer_step`",
    "on_predict": "after `trainer.predict`",
    "on_prediction_step": "none: `Task.metrics` is called for each batch",
    "on_push_begin": "none: nothing is pushed",
    "on_save": "none: a hook's `state_dict` is saved with each checkpoint",
    "on_step_begin": "`on_train_batch_start`",
    "on_step_end": "`on_train_batch_end`",
    "on_substep_end": "none: there is no event per micro-batch",
    "on_train_begin": "`on_fit_start`; create objects that have state in `on_setup`",
    "on_train_end": "`on_fit_end`",
}
"""The events of a TrainerCallback, and the hooks that replace them."""


def config_from_training_arguments(args: Any, num_devices: int = 1) -> ConvertedConfig:
    """Convert Hugging Face's TrainingArguments to a mapping for `load_config(defaults=…)`.

    `num_devices` is the number of devices they were chosen for. It makes global_batch_size the
    number of samples per step so far, which then stays the same at any number of ranks. ConfigError
    names every field that is set and has no counterpart in Drivetrain.
    """
    usual = type(args)(output_dir=args.output_dir)
    problems: list[Problem] = []
    config: dict[str, Any] = {}
    open_keys: set[str] = set()
    for name in sorted(field.name for field in dataclasses.fields(args)):
        value = getattr(args, name)
        if name in KEYS:
            try:
                found = KEYS[name][1](value, args)
            except ConfigError as error:
                problems += error.problems
                continue
            config.update(found)
            if value == getattr(usual, name):
                open_keys.update(found)
        elif name not in NOT_NEEDED and value != getattr(usual, name):
            remedy = NOT_THERE.get(name, "leave it out").replace("`", "")
            problems.append(Problem(name, "has no counterpart", remedy, value))
    if problems:
        raise ConfigError(problems)
    config["global_batch_size"] *= num_devices
    open_keys -= {"global_batch_size", "output_dir"}
    return ConvertedConfig(config, open_keys, type(args).__name__)


def tables() -> dict[str, str]:
    """Return the tables for the documentation, by name."""
    fields = {
        **{name: said for name, (said, _) in KEYS.items()},
        **{name: f"not needed: {why}" for name, why in NOT_NEEDED.items()},
        **{name: f"not supported, refused if set: {what}" for name, what in NOT_THERE.items()},
    }
    return {
        "arguments": _table("TrainingArguments", "here", fields),
        "callbacks": _table("TrainerCallback", "hook", CALLBACKS),
    }


def _table(left: str, right: str, rows: Mapping[str, str]) -> str:
    lines = [f"| `{name}` | {said} |" for name, said in sorted(rows.items())]
    return "\n".join([f"| {left} | {right} |", "| --- | --- |", *lines])

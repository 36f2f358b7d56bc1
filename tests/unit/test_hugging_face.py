"""TrainingArguments in our words: no field of the installed version is left out."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from drivetrain import ConfigError, Hook, config_from_training_arguments, load_config
from drivetrain.compat.hugging_face import CALLBACKS, KEYS, NOT_NEEDED, NOT_THERE, tables
from drivetrain.config.keys import leaf_keys

PAGE = Path(__file__).parents[2] / "docs" / "migrate" / "hf-trainer.md"


def arguments(**changes: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.TrainingArguments(**{"output_dir": "out", "use_cpu": True, **changes})


def test_every_field_and_every_event_has_its_line() -> None:
    transformers = pytest.importorskip("transformers")
    fields = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    assert {*KEYS, *NOT_NEEDED, *NOT_THERE} == fields
    assert len(KEYS) + len(NOT_NEEDED) + len(NOT_THERE) == len(fields)  # each stands once
    events = {name for name in dir(transformers.TrainerCallback) if name.startswith("on_")}
    assert CALLBACKS.keys() == events


def test_the_keys_and_hooks_that_are_named_exist() -> None:
    words = " ".join([*(said for said, _ in KEYS.values()), *NOT_NEEDED.values()]).split("`")[1::2]
    keys = [word.partition(":")[0] for word in words if "." in word and "(" not in word]
    ours = [key for key in keys if key.partition(".")[0] not in ("trainer", "logging", "Task")]
    assert ours
    assert [key for key in ours if key not in leaf_keys()] == []
    hooks = [said.split("`")[1] for said in CALLBACKS.values() if said.startswith("`")]
    assert [name for name in hooks if not hasattr(Hook, name)] == []


def test_the_page_has_the_tables() -> None:
    page = PAGE.read_text()
    for table in tables().values():
        assert table in page


def test_what_is_said_is_said_here() -> None:
    config = config_from_training_arguments(
        arguments(
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            num_train_epochs=2,
            learning_rate=3e-4,
            lr_scheduler_type="cosine",
            warmup_steps=0.1,
            weight_decay=0.1,
            bf16=True,
            eval_strategy="steps",
            eval_steps=50,
            save_steps=100,
            save_total_limit=3,
            load_best_model_at_end=True,
            metric_for_best_model="eval_accuracy",
            report_to=["tensorboard"],
            gradient_checkpointing=True,
            seed=7,
        ),
        num_devices=8,
    )
    said = load_config(argv=[], defaults=config).config
    assert (said.global_batch_size, said.micro_batch_size, said.seed) == (64, 4, 7)
    assert (said.num_train_epochs, said.max_steps) == (2, None)
    optimization = said.optimization
    assert (optimization.learning_rate, optimization.weight_decay) == (3e-4, 0.1)
    assert (optimization.lr_scheduler_type, optimization.warmup_ratio) == ("cosine", 0.1)
    assert optimization.max_grad_norm == 1.0  # their default
    assert (said.precision.dtype, said.memory.activation_checkpointing) == ("bf16", "full")
    assert (said.evaluation.every_steps, said.checkpoint.every_steps) == (50, 100)
    assert (said.checkpoint.keep_best, said.checkpoint.keep_best_mode) == ("accuracy", "max")
    assert (said.checkpoint.keep_last, said.record.sinks) == (3, ("tensorboard",))


def test_their_defaults_are_a_config() -> None:
    said = load_config(argv=[], defaults=config_from_training_arguments(arguments())).config
    assert (said.global_batch_size, said.num_train_epochs) == (8, 3)
    assert said.optimization.lr_scheduler_type == "linear"


def test_what_has_no_counterpart_is_refused_all_at_once() -> None:
    args = arguments(adam_beta2=0.95, label_smoothing_factor=0.1, save_strategy="epoch")
    with pytest.raises(ConfigError) as caught:
        config_from_training_arguments(args)
    assert str(caught.value).splitlines() == [
        "adam_beta2 = 0.95: has no counterpart; create the optimizer in Task(optimizer=…)",
        "label_smoothing_factor = 0.1: has no counterpart; in the loss: "
        "cross_entropy(label_smoothing=…)",
        "save_strategy = epoch: has no counterpart; "
        'use "steps"; or "no", and set checkpoint.every_steps',
    ]

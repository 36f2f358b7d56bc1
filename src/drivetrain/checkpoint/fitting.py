"""Check that a checkpoint fits the model, before anything is overwritten."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from drivetrain.checkpoint.shards import ShardReader
from drivetrain.checkpoint.tensor_index import described
from drivetrain.core.errors import ConfigError, Problem

_MODEL = "model."


def check_same_model(folder: str, own: Collection[str], stored: Collection[str]) -> None:
    """Raise ConfigError if the model and the checkpoint do not have the same weights.

    Weights that this model lacks would be missing from later checkpoints, and so be lost.
    """
    weights = {name for name in stored if name.startswith(_MODEL)}
    rules = {
        f"checkpoint {folder} has no": set(own) - weights,
        f"this model lacks weights that checkpoint {folder} has:": weights - set(own),
    }
    remedy = "resume with the model that was saved, or start a new run"
    problems = [
        Problem("model", f"{rule} {_few(names)}", remedy, has_value=False)
        for rule, names in rules.items()
        if names
    ]
    if problems:
        raise ConfigError(problems)


def _few(names: Collection[str]) -> str:
    shown = ", ".join(name.removeprefix(_MODEL) for name in sorted(names)[:3])
    return f"{shown} …" if len(names) > 3 else shown


def check_shapes(folder: str, targets: Mapping[str, torch.Tensor], reader: ShardReader) -> None:
    """Raise ConfigError if the checkpoint stores weights with other shapes."""
    metadata = reader.read_metadata()
    stored = {name: tuple(described(metadata, name).size) for name in targets}
    wrong = [
        Problem(
            name.removeprefix("model."),
            f"checkpoint {folder} has shape {stored[name]}",
            "resume with the model that was saved, or start a new run",
            tuple(tensor.shape),
        )
        for name, tensor in targets.items()
        if stored[name] != tuple(tensor.shape)
    ]
    if wrong:
        raise ConfigError(wrong[:5])

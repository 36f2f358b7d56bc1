"""Is what a checkpoint holds what this model needs? Asked before anything is overwritten."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from drivetrain.checkpoint.shards import ShardReader
from drivetrain.checkpoint.tensor_index import described
from drivetrain.core.errors import ConfigError, Problem


def check_same_model(folder: str, missing: list[str]) -> None:
    """ConfigError when weights that this model has are not in it."""
    if missing:
        names = ", ".join(name.removeprefix("model.") for name in missing[:3])
        raise ConfigError(
            [
                Problem(
                    "model",
                    f"checkpoint {folder} has no {names}{' …' if len(missing) > 3 else ''}",
                    "resume with the model that was saved, or start a new run",
                    has_value=False,
                )
            ]
        )


def check_shapes(folder: str, targets: Mapping[str, torch.Tensor], reader: ShardReader) -> None:
    """ConfigError when weights have other shapes in it."""
    metadata = reader.read_metadata()
    stored = {name: tuple(described(metadata, name).size) for name in targets}
    wrong = [
        Problem(
            name.removeprefix("model."),
            f"checkpoint {folder} has it as {stored[name]}",
            "resume with the model that was saved, or start a new run",
            tuple(tensor.shape),
        )
        for name, tensor in targets.items()
        if stored[name] != tuple(tensor.shape)
    ]
    if wrong:
        raise ConfigError(wrong[:5])

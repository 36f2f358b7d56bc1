"""What a script records of its own, beside the run's: numbers, texts and images, at the step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from drivetrain.core.errors import ConfigError, Problem
from drivetrain.train.attempt import Attempt


def log_scalars(attempt: Attempt, values: Mapping[str, Any]) -> None:
    """Rank 0's numbers; the run's own names (`train/loss`) are taken."""
    numbers = {}
    for name, value in values.items():
        if isinstance(value, torch.Tensor) and value.numel() != 1:
            remedy = "log its mean(), or use log_image"
            problem = Problem(f"log[{name!r}]", "is no single number", remedy, tuple(value.shape))
            raise ConfigError([problem])
        numbers[name] = float(value)
    if attempt.assembly.world.is_main:
        attempt.recorder.scalars(attempt.saver.at.step, numbers)


def log_text(attempt: Attempt, name: str, text: str) -> None:
    """Rank 0's text: in the run's events, and in every sink that takes texts."""
    if attempt.assembly.world.is_main:
        attempt.recorder.medium(attempt.saver.at.step, name, str(text))


def log_image(attempt: Attempt, name: str, image: Any) -> None:
    """Rank 0's image, in every sink that takes images; said when there is none."""
    if not attempt.assembly.world.is_main:
        return
    pixels = as_pixels(image)
    if not attempt.recorder.medium(attempt.saver.at.step, name, pixels):
        attempt.reporter.say_once(
            "warning: log_image: no sink of this run takes images; record.sinks: tensorboard, "
            "mlflow or wandb"
        )


def as_pixels(image: Any) -> np.ndarray[Any, Any]:
    """Rows, columns and colours of bytes, from what people have.

    A tensor is channels first, as torch has it, in 0 to 1 or in bytes; an array or a PIL image has
    its channels last. Two dimensions are grey.
    """
    is_tensor = isinstance(image, torch.Tensor)
    array = np.asarray(image.detach().cpu().float() if is_tensor else image)
    if is_tensor and image.dtype == torch.uint8:
        array = array.astype(np.uint8)
    if array.ndim == 2:
        array = array[None] if is_tensor else array[..., None]
    if array.ndim == 3 and is_tensor:
        array = np.moveaxis(array, 0, -1)
    if array.ndim != 3 or array.shape[-1] not in (1, 3, 4):
        rule = "is no image of 1, 3 or 4 colours"
        remedy = "pass a tensor (colours, rows, columns), or an array (rows, columns, colours)"
        raise ConfigError([Problem("log_image", rule, remedy, tuple(array.shape))])
    if array.dtype != np.uint8:
        if not (math.isfinite(array.min()) and array.min() >= 0 and array.max() <= 1):
            rule = f"has values from {array.min():g} to {array.max():g}"
            remedy = "scale it to 0 … 1, or pass bytes"
            raise ConfigError([Problem("log_image", rule, remedy, has_value=False)])
        array = np.round(array * 255).astype(np.uint8)
    return np.repeat(array, 3, axis=-1) if array.shape[-1] == 1 else array

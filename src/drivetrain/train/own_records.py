"""What a script records of its own, beside the run's: numbers, texts and images, at the step."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from drivetrain.core.errors import ConfigError, Problem
from drivetrain.train.attempt import Attempt


class OwnRecords(ABC):
    """What `Trainer` and a loop of one's own have in common: recording at the step under way."""

    @abstractmethod
    def _under_way(self, what: str) -> Attempt:
        """The attempt that trains; RuntimeError, saying where `what` belongs, when none does."""

    def log(self, values: Mapping[str, Any]) -> None:
        """Record numbers of your own at the present step, in every sink; rank 0's are kept."""
        attempt, numbers = self._under_way("log"), {}
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and value.numel() != 1:
                rule, remedy = "is no single number", "log its mean(), or use log_image"
                raise ConfigError([Problem(f"log[{name!r}]", rule, remedy, tuple(value.shape))])
            numbers[name] = float(value)
        if attempt.assembly.world.is_main:
            attempt.recorder.scalars(attempt.saver.at.step, numbers)

    def log_text(self, name: str, text: str) -> None:
        """Record a text at the present step: in the run's events, and in sinks that take texts."""
        attempt = self._under_way("log_text")
        if attempt.assembly.world.is_main:
            attempt.recorder.medium(attempt.saver.at.step, name, str(text))

    def log_image(self, name: str, image: Any) -> None:
        """Record an image at the present step, in sinks that take images.

        A tensor (colours, rows, columns) or an array (rows, columns, colours), in 0 to 1 or bytes.
        """
        attempt = self._under_way("log_image")
        if not attempt.assembly.world.is_main:
            return
        if not attempt.recorder.medium(attempt.saver.at.step, name, as_pixels(image)):
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

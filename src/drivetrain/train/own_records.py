"""Numbers, texts and images that a script records at the current step."""

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
    """Recording methods that `Trainer` and `KeptLoop` share."""

    @abstractmethod
    def _under_way(self, what: str) -> Attempt:
        """Return the training attempt; RuntimeError about `what` if nothing is training."""

    def log(self, values: Mapping[str, Any]) -> None:
        """Record your own numbers at the current step in every sink; rank 0's values are kept."""
        attempt, numbers = self._under_way("log"), {}
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and value.numel() != 1:
                rule, remedy = "is not a single number", "log its mean(), or use log_image"
                raise ConfigError([Problem(f"log[{name!r}]", rule, remedy, tuple(value.shape))])
            numbers[name] = float(value)
        if attempt.assembly.world.is_main:
            attempt.recorder.scalars(attempt.saver.at.step, numbers)

    def log_text(self, name: str, text: str) -> None:
        """Record a text at the current step: in the run's events and in sinks that take texts."""
        attempt = self._under_way("log_text")
        if attempt.assembly.world.is_main:
            attempt.recorder.medium(attempt.saver.at.step, name, str(text))

    def log_image(self, name: str, image: Any) -> None:
        """Record an image at the current step in sinks that take images.

        The image is a tensor (channels, rows, columns) or an array (rows, columns, channels), with
        values from 0 to 1 or of dtype uint8.
        """
        attempt = self._under_way("log_image")
        if not attempt.assembly.world.is_main:
            return
        if not attempt.recorder.medium(attempt.saver.at.step, name, as_pixels(image)):
            attempt.reporter.say_once(
                "warning: log_image: no sink of this run takes images; add tensorboard, mlflow or "
                "wandb to record.sinks"
            )


def as_pixels(image: Any) -> np.ndarray[Any, Any]:
    """Convert an image to an array of uint8 (rows, columns, channels).

    A tensor has its channels first; an array or a PIL image has them last. Values are from 0 to 1
    or uint8. Two dimensions are a greyscale image.
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
        rule = "is not an image with 1, 3 or 4 channels"
        remedy = "pass a tensor (channels, rows, columns), or an array (rows, columns, channels)"
        raise ConfigError([Problem("log_image", rule, remedy, tuple(array.shape))])
    if array.dtype != np.uint8:
        if not (math.isfinite(array.min()) and array.min() >= 0 and array.max() <= 1):
            rule = f"has values from {array.min():g} to {array.max():g}"
            remedy = "scale it to 0 … 1, or pass uint8"
            raise ConfigError([Problem("log_image", rule, remedy, has_value=False)])
        array = np.round(array * 255).astype(np.uint8)
    return np.repeat(array, 3, axis=-1) if array.shape[-1] == 1 else array

"""GradientCompression: top-k gradient compression, under its common name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from drivetrain.core.errors import ConfigError, Problem
from drivetrain.strategies.ddp.compression import largest_places


class GradientCompression:
    """Top-k compression: keeps the largest `compression_ratio` of each gradient's elements.

    Passed to a trainer as `compression=`, it means `communication.compression=topk`, which adds
    what was not sent to the next step's gradients. The two methods here discard it.
    """

    def __init__(self, compression_ratio: float = 0.1) -> None:
        if not 0 < compression_ratio <= 1:
            rule, remedy = "must be above 0 and at most 1", "0.1 sends a tenth"
            raise ConfigError([Problem("compression_ratio", rule, remedy, compression_ratio)])
        self.compression_ratio = compression_ratio

    @property
    def settings(self) -> dict[str, Any]:
        """The same settings as a config section."""
        return {"compression": "topk", "topk": {"ratio": self.compression_ratio}}

    def compress_gradients(
        self, gradients: Iterable[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Return the gradients with zeros in place of their small elements; None stays None."""
        return [None if each is None else self._largest(each) for each in gradients]

    def decompress_gradients(
        self, compressed: list[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Return the gradients unchanged: they are already whole tensors."""
        return compressed

    def _largest(self, gradient: torch.Tensor) -> torch.Tensor:
        flat = gradient.reshape(-1)
        places = largest_places(flat, self.compression_ratio)
        kept = torch.zeros_like(flat)
        kept[places] = flat[places]
        return kept.view_as(gradient)

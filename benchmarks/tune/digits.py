"""The trials of `benchmarks.tune.quality`: a small network on the digits, the same for every arm.

In a module of its own, which Ray's workers import.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from drivetrain.tune.space import Float, Space

EVERY, LAST = 27, 243
"""Steps from one evaluation to the next, and of a whole trial."""
RANGES = {
    "optimization.learning_rate": Float(1e-4, 1.0, log=True),
    "optimization.momentum": Float(0.0, 0.99),
    "optimization.weight_decay": Float(1e-6, 1e-1, log=True),
    "optimization.max_grad_norm": Float(0.1, 10.0, log=True),
}
SPACE = Space(RANGES)
_WORST = 100.0
"""Instead of a loss that is no number, for every arm: their rules for that are others."""
_BATCH = 32


@dataclass(frozen=True)
class Point:
    """One evaluation."""

    step: int
    val: float
    test: float


@cache
def _digits() -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    """Train, validate, test: 1,000, 400 and 397 images."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.data / 16, dtype=torch.float32)[order]
    labels = torch.tensor(digits.target)[order]
    return tuple(
        (images[a:b], labels[a:b]) for a, b in ((0, 1000), (1000, 1400), (1400, len(order)))
    )


class Training:
    """One trial: a function of its values, the seed and the step, whoever asks for it."""

    def __init__(self, values: Mapping[str, Any], seed: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10)
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0, momentum=0.5)
        self.seed, self.step = seed, 0
        self.use(values)

    def use(self, values: Mapping[str, Any]) -> None:
        """Values are taken up in the middle, too."""
        said = {key.partition(".")[2]: float(value) for key, value in values.items()}
        self.max_grad_norm = said.pop("max_grad_norm")
        said["lr"] = said.pop("learning_rate")
        self.optimizer.param_groups[0].update(said)

    def train_to(self, step: int) -> Point:
        """From wherever it is; the batch of a step is the same for all trials."""
        (images, labels), *_ = _digits()
        while self.step < step:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.step)
            batch = torch.randint(len(labels), (_BATCH,), generator=generator)
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(images[batch]), labels[batch]).backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
            self.optimizer.step()
            self.step += 1
        return Point(self.step, *(self._loss(part) for part in _digits()[1:]))

    @torch.no_grad()
    def _loss(self, part: tuple[torch.Tensor, torch.Tensor]) -> float:
        found = float(F.cross_entropy(self.model(part[0]), part[1]))
        return min(found, _WORST) if math.isfinite(found) else _WORST

    def state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }

    def load(self, state: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        """Another trial's weights and optimizer, under these values."""
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.use(values)


def ray_trial(config: dict[str, Any]) -> None:
    """The same training; a member of a population saves at each report, to be forked from."""
    from ray import tune

    values = {key: config[key] for key in RANGES}
    training = Training(values, config["seed"])
    if (saved := tune.get_checkpoint()) is not None:
        with saved.as_directory() as folder:
            training.load(torch.load(Path(folder) / "state.pt", weights_only=True), values)
    while training.step < LAST:
        point = training.train_to(training.step + EVERY)
        said = {"loss": point.val, "test": point.test, "step": point.step}
        if not config["saves"]:
            tune.report(said)
            continue
        with tempfile.TemporaryDirectory() as folder:
            torch.save(training.state(), Path(folder) / "state.pt")
            tune.report(said, checkpoint=tune.Checkpoint.from_directory(folder))

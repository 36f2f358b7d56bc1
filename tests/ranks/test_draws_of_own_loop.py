"""What a script draws in its own loop is the same at any number of ranks, and after a resume."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from drivetrain.testing import run_ranks
from drivetrain.train.keep_loop import prepare
from tests.ranks.small_task import samples, small_task

CONFIG = {
    "global_batch_size": 12,
    "micro_batch_size": 2,
    "max_steps": 6,
    "record": {"progress": "none", "sinks": [], "logging_steps": 1},
}


def drawn() -> float:
    return float(torch.rand(())) + float(np.random.rand()) + random.random()  # noqa: S311


def losses_with_draws(output_dir: str) -> list[float]:
    """Draw before, between and after a step's micro-batches, as MixUp or noise would."""
    config = {**CONFIG, "output_dir": output_dir, "data": {"num_workers": 1}}
    loop = prepare(small_task(width=8).model, None, samples(), config)
    for step in loop.steps():
        noise = drawn()
        for x, y in step:
            loop.backward(F.cross_entropy(loop.model(x + noise + drawn()), y))
        loop.step()
        with torch.no_grad():
            for parameter in loop.model.parameters():
                parameter.add_(0.01 * drawn())
    return loop.history.losses


def losses_of_two_models(output_dir: str) -> list[float]:
    config = {**CONFIG, "output_dir": output_dir}
    make = small_task(width=8).model
    loop = prepare({"a": make, "b": make}, None, samples(), config)
    for step in loop.steps():
        for name in ("a", "b"):
            noise = drawn()
            for x, y in step:
                loop.backward(F.cross_entropy(loop.model[name](x + noise), y), name)
            loop.step(name)
    return loop.history.losses


@pytest.mark.slow
@pytest.mark.parametrize("train", [losses_with_draws, losses_of_two_models])
def test_draws_depend_on_the_step_and_not_on_the_ranks(
    tmp_path: Path, train: Callable[[str], list[float]]
) -> None:
    one, three = (run_ranks(train, n, 100, (str(tmp_path / str(n)),)) for n in (1, 3))
    assert one[0] == pytest.approx(three[0], abs=1e-5)
    assert three[0] == three[2]

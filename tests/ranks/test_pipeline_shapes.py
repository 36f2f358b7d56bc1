"""A pipeline whose micro-batches keep changing shape holds the buffers of a few shapes only."""

from __future__ import annotations

import gc
import warnings
from typing import Any

from torch.distributed.pipelining import PipelineStage
from torch.utils.data import DataLoader

from drivetrain.parallel.pipeline.pipelined import MOST
from drivetrain.testing import run_ranks
from drivetrain.train.hooks import Hook
from drivetrain.train.trainer import Trainer
from tests.gpt_task import Sentences, collate, gpt_task
from tests.ranks import matrix

STEPS = 24


class Counts(Hook):
    def __init__(self) -> None:
        self.live = 0
        self.losses: list[float] = []

    def on_fit_end(self, trainer: Trainer) -> None:
        self.live = sum(isinstance(x, PipelineStage) for x in gc.get_objects())


def train(output_dir: str) -> tuple[int, list[float], list[str]]:
    counts = Counts()
    config = matrix.config(output_dir, STEPS, {"pp": 2, "pipeline": {"schedule": "gpipe"}})
    config |= {"global_batch_size": 2, "micro_batch_size": 1}
    gc.disable()  # what is dropped must go by itself, not when the collector comes by
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        history = Trainer(gpt_task(dropout=0.0), config, hooks=[counts]).fit(
            DataLoader(Sentences(200), collate_fn=collate)
        )
    about_shapes = [str(w.message) for w in said if "shape" in str(w.message)]
    return counts.live, history.losses, about_shapes


def test_stages_of_shapes_long_gone_are_released_and_it_is_said_once(tmp_path: Any) -> None:
    (live, losses, said), (other, _, unsaid) = run_ranks(train, 2, 500, args=(str(tmp_path),))
    assert len(losses) == STEPS
    assert max(live, other) <= MOST
    assert len(said) == 1
    assert "keep changing shape" in said[0]
    assert unsaid == []

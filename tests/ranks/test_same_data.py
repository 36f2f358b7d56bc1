"""Every rank must bring the same dataset: which samples it trains is Drivetrain's affair."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from drivetrain.core.errors import WorkerFailure
from drivetrain.testing import run_ranks
from drivetrain.train.keep_loop import prepare
from drivetrain.train.trainer import Trainer
from tests.ranks.small_task import samples, small_task


def train(output_dir: str, own_loop: bool) -> None:
    config: dict[str, Any] = {
        "global_batch_size": 8,
        "max_steps": 2,
        "output_dir": output_dir,
        "record": {"progress": "none", "sinks": []},
    }
    data = samples(24 - 4 * dist.get_rank())
    if own_loop:
        prepare(small_task().model, None, data, config)
    else:
        Trainer(small_task(), config).fit(data)


@pytest.mark.parametrize("own_loop", [False, True])
def test_datasets_of_unequal_length_are_refused(tmp_path: Path, own_loop: bool) -> None:
    rule = r"data: rank 1 has 20 samples and rank 0 has 24; make the same dataset on every rank"
    with pytest.raises(WorkerFailure, match=rule):
        run_ranks(train, 2, 60, args=(str(tmp_path), own_loop))

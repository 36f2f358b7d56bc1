"""A LightningModule on two ranks trains and measures what it does on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from drivetrain.testing import run_ranks

pytest.importorskip("lightning")


def trained(output_dir: str, strategies: tuple[str, ...]) -> list[Any]:
    import torch

    from drivetrain import Task, Trainer
    from tests.unit.test_lightning import Data, Module

    def make() -> Any:
        torch.manual_seed(1)
        return Module("step")

    found = []
    for strategy in strategies:
        config = {
            "global_batch_size": 16,
            "micro_batch_size": 8,
            "num_train_epochs": 2,
            "evaluation": {"batch_size": 3},  # 16 samples: an odd one out on two ranks
            "parallel": {"strategy": strategy},
            "output_dir": output_dir,
            "record": {"progress": "none", "sinks": []},
        }
        history = Trainer(Task.from_lightning(make, Data()), config).fit()
        found.append((history.losses, [each.metrics for each in history.evaluations]))
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_two_ranks_are_as_one(tmp_path: Path) -> None:
    ((losses, metrics),) = trained(str(tmp_path / "one"), ("ddp",))
    for rank in run_ranks(trained, 2, args=(str(tmp_path), ("ddp", "fsdp"))):
        for other_losses, other_metrics in rank:
            assert other_losses == pytest.approx(losses, rel=1e-5)
            for mine, other in zip(metrics, other_metrics, strict=True):
                assert other == pytest.approx(mine, rel=1e-5)

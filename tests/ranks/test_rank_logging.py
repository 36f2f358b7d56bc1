"""A line that a script logs appears once, or labelled by rank."""

from __future__ import annotations

import io
import logging
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from drivetrain import Hook, Task, Trainer
from drivetrain.testing import run_ranks


class Says(Hook):
    def on_train_batch_end(self, trainer: Trainer, step: int) -> None:
        logging.getLogger("mine").info("done with %d", step)
        logging.getLogger("mine").warning("look at %d", step)


def said(output_dir: str) -> list[tuple[str, int]]:
    found = []
    for choice in ("first", "all"):
        sys.stderr, file = io.StringIO(), io.StringIO()
        console = logging.StreamHandler(sys.stderr)
        console.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
        logging.basicConfig(
            handlers=[console, logging.StreamHandler(file)], level=logging.INFO, force=True
        )
        config: dict[str, Any] = {
            "global_batch_size": 4,
            "max_steps": 1,
            "output_dir": output_dir,
            "record": {"progress": "none", "sinks": [], "log_ranks": choice},
        }
        task = Task(lambda: nn.Linear(2, 1), lambda model, batch: model(batch[0]).mean())
        Trainer(task, config, hooks=[Says()]).fit(TensorDataset(torch.ones(8, 2)))
        mine = [line for line in sys.stderr.getvalue().splitlines() if " 1" in line]
        found.append(("\n".join(mine), file.getvalue().count("done with 1")))
    sys.stderr = sys.__stderr__
    return found


def test_lines_of_logging_appear_once_or_labelled(tmp_path: Path) -> None:
    first, second = run_ranks(said, 2, args=(str(tmp_path),))
    assert first == [
        ("INFO done with 1\nWARNING look at 1", 1),
        ("[rank 0] INFO done with 1\n[rank 0] WARNING look at 1", 1),
    ]
    assert second == [
        ("[rank 1] WARNING look at 1", 1),  # its own file has all of it
        ("[rank 1] INFO done with 1\n[rank 1] WARNING look at 1", 1),
    ]

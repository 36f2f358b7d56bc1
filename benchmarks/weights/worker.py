"""One rank: says where it is, and goes on when it is told to."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed.fsdp
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.weights.model import PARTS, make_model
from drivetrain.train.hooks import Hook
from drivetrain.train.task import Task
from drivetrain.train.trainer import Trainer

_LENGTH = 32


def mark(name: str) -> None:
    sys.stdout.write(f"mark: {name}\n")
    sys.stdout.flush()
    sys.stdin.readline()


class Marks(Hook):
    def on_setup(self, trainer: Trainer) -> None:  # noqa: ARG002
        mark("made")

    def on_train_batch_end(self, trainer: Trainer, step: int) -> None:  # noqa: ARG002
        mark(f"step {step}")


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    tokens = batch[0]
    logits = model(tokens[:, :-1]).logits
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def main() -> None:
    torch.set_num_threads(1)
    with torch.device("meta"):
        make_model()  # so that all of its code is imported
    config = {
        "global_batch_size": 4,
        "micro_batch_size": 1,
        "output_dir": f"{sys.argv[2]}/runs",
        "parallel": {"strategy": "fsdp"},
        "record": {"progress": "none", "sinks": []},
        **json.loads(sys.argv[1]),
    }
    generator = torch.Generator().manual_seed(0)
    size = (64, _LENGTH + 1)
    tokens = torch.randint(int(PARTS["vocab_size"]), size, generator=generator)
    trainer = Trainer(Task(make_model, loss), config, hooks=[Marks()])
    mark("ready")
    trainer.fit(TensorDataset(tokens))


if __name__ == "__main__":
    main()

"""A training that is correct but slow. Find out where its time goes, and make it fast.

    drivetrain train --run-dir runs/slow --nproc-per-node 2 labs/template_lab_slow.py
    drivetrain status runs/slow

The check runs it on two hosts, alternating with the solution, and compares steps per second. It
must stay the same training: the same losses in every step, and a checkpoint at least every 20
steps. `read` simulates remote storage: it answers after two milliseconds, and you cannot make it
faster.
"""

import json
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from drivetrain import Task, Trainer, load_config

NUM_SAMPLES, FEATURES, WIDTH, DEPTH, CLASSES = 512, 48, 64, 16, 10
ACCURACY: list[float] = []


def make_lines() -> list[str]:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(NUM_SAMPLES, FEATURES, generator=generator)
    classes = (inputs @ torch.randn(FEATURES, CLASSES, generator=generator)).argmax(dim=1)
    both = zip(inputs.tolist(), classes.tolist(), strict=True)
    return [json.dumps({"signal": signal, "class": kind}) for signal, kind in both]


LINES = make_lines()


def read(index: int) -> str:
    """Read one line from remote storage."""
    time.sleep(0.002)
    return LINES[index]


class Samples(Dataset):
    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int):
        line = json.loads(read(index))
        return torch.tensor(line["signal"]), torch.tensor(line["class"])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, signal):
        x = self.first(smoothed(signal))
        for block in self.blocks:
            x = x + F.gelu(block(x))
        return self.last(x)


def smoothed(signal):
    """Return the mean of each value and its neighbours."""
    means = []
    for place in range(signal.shape[1]):
        around = signal[:, max(0, place - 1) : place + 2]
        means.append(around.mean(dim=1))
    return torch.stack(means, dim=1)


def loss(model, batch):
    signal, classes = batch
    logits = model(signal)
    note_accuracy(logits.detach(), classes)
    return F.cross_entropy(logits, classes)


def note_accuracy(logits, classes) -> None:
    """The accuracy over all ranks, on every rank."""
    right = (logits.argmax(dim=1) == classes).float().mean()
    if dist.is_initialized():
        dist.all_reduce(right)
        right /= dist.get_world_size()
    ACCURACY.append(right.item())


def main() -> None:
    config = load_config(
        defaults={
            "name": "slow",
            "global_batch_size": 64,
            "micro_batch_size": 2,
            "max_steps": 60,
            "optimization": {"learning_rate": 1e-3},
            "parallel": {"ddp": {"bucket_cap_mb": 0.001}},
            "checkpoint": {"every_steps": 1, "asynchronous": False},
            "record": {"sinks": []},
        }
    )
    Trainer(Task(Model, loss), config).fit(Samples())


if __name__ == "__main__":
    main()

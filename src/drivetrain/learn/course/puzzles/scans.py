"""Classify scans as clear or blurred; one scan of each step is kept for a contact sheet.

drivetrain train --nproc-per-node 2 puzzles/scans.py
"""

import re
import resource
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from drivetrain import Hook, Task, Trainer, load_config

NUM_SCANS, SIDE = 1024, 64
MIB = 1 << 20
ALLOWED_MORE = 512 * MIB
"""Memory that a process may allocate after its start, like a container's limit."""


def scanned():
    generator = torch.Generator().manual_seed(4)
    scans = torch.randn(NUM_SCANS, SIDE, SIDE, generator=generator)
    is_blurred = torch.arange(NUM_SCANS) % 2
    scans[1::2] = (scans[1::2] + scans[1::2].roll(1, 1) + scans[1::2].roll(1, 2)) / 3
    return TensorDataset(scans, is_blurred)


def make_model():
    return nn.Sequential(nn.Conv2d(1, 4, 5, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(900, 2))


class ContactSheet(Hook):
    """Keeps one small picture of each step, shown at the end: 16 KiB a step."""

    def __init__(self):
        self.pictures = []

    def keep(self, scans):
        first = scans[0]
        self.pictures.append(first)

    def on_fit_end(self, trainer):
        if trainer.is_main:
            sheet = torch.stack(self.pictures)
            print(f"contact sheet of {len(sheet)} scans, {sheet.nbytes / MIB:.1f} MiB")


def limit_memory():
    status = Path("/proc/self/status").read_text()
    now = int(re.search(r"VmData:\s+(\d+) kB", status)[1]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (now + ALLOWED_MORE, now + ALLOWED_MORE))


def main():
    config = load_config(
        defaults={
            "global_batch_size": 1024,
            "micro_batch_size": 512,
            "max_steps": 80,
            "optimization": {"learning_rate": 1e-3},
            "checkpoint": {"every_steps": None},
        }
    )
    sheet = ContactSheet()

    def loss(model, batch):
        scans, is_blurred = batch
        if trainer.is_main:
            sheet.keep(scans)
        return F.cross_entropy(model(scans.unsqueeze(1)), is_blurred)

    trainer = Trainer(Task(model=make_model, loss=loss), config, hooks=[sheet])
    data = scanned()
    limit_memory()
    trainer.fit(data)


if __name__ == "__main__":
    main()

"""A small mixture of experts on samples of one length, each word of the command line a setting."""

from __future__ import annotations

import torch

from drivetrain import Task, Trainer, load_config
from tests.ranks.models import gpt_loss, moe

if __name__ == "__main__":
    config = load_config(defaults={"max_steps": 2, "global_batch_size": 16})
    samples = torch.arange(32).expand(64, 32)
    Trainer(Task(moe, gpt_loss), config).fit(torch.utils.data.TensorDataset(samples, samples))

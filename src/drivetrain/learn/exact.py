"""A training whose bits do not depend on the number of ranks: gradients are added by micro-batch.

Only what the learner writes can differ: which samples, which dropout, which state.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from drivetrain.learn.training import samples

SEED = 11
NUM_SAMPLES, SIZE, NUM_MICRO = 50, 3, 4


class ExactJob:
    """Model, optimizer and scheduler, and how many steps are done."""

    def __init__(self) -> None:
        self.model = nn.Linear(12, 5)
        with torch.no_grad():
            for p in self.model.parameters():
                p.copy_(torch.linspace(-0.5, 0.5, p.numel()).view_as(p))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.8)
        self.step = 0

    @property
    def row_length(self) -> int:
        return sum(p.numel() for p in self.model.parameters()) + 1

    def row(self, resume: Any, micro_batch: int) -> torch.Tensor:
        """Gradients and loss of one micro-batch; `resume` is the learner's module of that name."""
        ids = resume.micro_batch_ids(SEED, NUM_SAMPLES, SIZE, self.step, micro_batch, NUM_MICRO)
        inputs, classes = (part[list(ids)] for part in samples(NUM_SAMPLES))
        generator = resume.generator_of(SEED, self.step, micro_batch)
        kept = torch.rand(inputs.shape, generator=generator) > 0.2
        loss = nn.functional.cross_entropy(self.model(inputs * kept), classes)
        gradients = torch.autograd.grad(loss, list(self.model.parameters()))
        return torch.cat([*(g.flatten() for g in gradients), loss.detach().reshape(1)])

    def apply(self, rows: torch.Tensor) -> float:
        """Step with the mean of all micro-batches, added in their order; return the loss."""
        total = rows[0] / NUM_MICRO
        for row in rows[1:]:
            total = total + row / NUM_MICRO
        begin = 0
        for p in self.model.parameters():
            p.grad = total[begin : begin + p.numel()].view_as(p).clone()
            begin += p.numel()
        self.optimizer.step()
        self.scheduler.step()
        self.step += 1
        return float(total[-1])

    @property
    def weights(self) -> list[float]:
        return [float(v) for p in self.model.parameters() for v in p.detach().flatten()]

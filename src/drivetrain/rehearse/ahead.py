"""Imported once by the fork server, the process that rehearsed ranks are forked from."""

from __future__ import annotations

import gc
import os

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import drivetrain.rehearse.worker
from drivetrain.supervise.processes.worker import import_ahead

__all__ = ["drivetrain"]


def take_a_fake_step() -> None:
    """Run a step with fake tensors, so that torch's lazy imports happen once, not in every rank."""
    torch.set_num_threads(1)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = nn.Sequential(nn.Embedding(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU())
        x = model(torch.zeros(2, 4, dtype=torch.long)).unsqueeze(1)
        x = nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True).flatten(0, 2)
        nn.functional.cross_entropy(x, torch.zeros(8, dtype=torch.long)).backward()
        torch.optim.SGD(model.parameters(), 0.1, momentum=0.9).step()


# the script's top-level imports, which would take seconds in each rank
import_ahead([os.environ.get("DRIVETRAIN_REHEARSE_SCRIPT", "")])
take_a_fake_step()
gc.freeze()  # garbage collection in a rank must not copy the shared memory

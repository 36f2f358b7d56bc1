"""Horovod on two hosts: a script for one process, and the changes that make it run on many."""

import sys
from pathlib import Path

import horovod.torch as hvd
import torch
from torch import nn

from drivetrain.learn.notes import note
from drivetrain.learn.training import global_batch, new_model, new_optimizer

NUM_STEPS = 20


def main(folder: str) -> None:
    hvd.init()

    rank, num_ranks = hvd.rank(), hvd.size()
    model = new_model(seed=rank)  # as in a script that sets no seed: weights differ by rank
    # Hooks on the parameters start an all-reduce as soon as a gradient is ready; step() waits for
    # them. Horovod's examples also multiply the learning rate by the number of ranks. That is a
    # different training: here the global batch stays the same.
    optimizer = hvd.DistributedOptimizer(
        new_optimizer(model), named_parameters=model.named_parameters()
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    for step in range(1, NUM_STEPS + 1):
        inputs, classes = global_batch(step)  # 24 samples, the same on every rank
        # The parts are equal, so the mean of the ranks' means is the mean over all samples.
        inputs, classes = inputs[rank::num_ranks], classes[rank::num_ranks]

        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), classes)
        loss.backward()
        optimizer.step()
        note(folder, step, rank, num_ranks, loss.item(), model)

    if rank == 0:
        torch.save(model.state_dict(), Path(folder) / f"weights-{rank}.pt")


if __name__ == "__main__":
    main(sys.argv[1])

"""Horovod on two hosts: a script for one process, and the changes that make it run on many.

On the first of two hosts that reach each other by ssh, the check runs

    horovodrun -np 2 -H h1:1,h2:1 --gloo --network-interfaces eth0 python FILE FOLDER

and requires that both ranks together give the losses of one process.
"""

import sys
from pathlib import Path

import horovod.torch as hvd
import torch
from torch import nn

from drivetrain.learn.notes import note
from drivetrain.learn.training import global_batch, new_model, new_optimizer

NUM_STEPS = 20


def main(folder: str) -> None:
    # TODO 1: initialize Horovod; nothing else of it works before.
    raise NotImplementedError("TODO 1: initialize Horovod")

    rank, num_ranks = hvd.rank(), hvd.size()
    model = new_model(seed=rank)  # as in a script that sets no seed: weights differ by rank
    optimizer = new_optimizer(model)
    # TODO 2: let Horovod average the gradients, in the optimizer's step.
    # TODO 3: all ranks begin with rank 0's weights and its optimizer's state.

    for step in range(1, NUM_STEPS + 1):
        inputs, classes = global_batch(step)  # 24 samples, the same on every rank
        # TODO 4: take this rank's part of them.

        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), classes)
        loss.backward()
        optimizer.step()
        note(folder, step, rank, num_ranks, loss.item(), model)

    # TODO 5: one file is enough.
    torch.save(model.state_dict(), Path(folder) / f"weights-{rank}.pt")


if __name__ == "__main__":
    main(sys.argv[1])

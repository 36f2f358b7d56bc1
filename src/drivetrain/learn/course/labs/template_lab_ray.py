"""Ray Train: two workers on two nodes; one of them is killed, and nothing is lost.

The check starts a Ray cluster of two hosts, runs this file on its head (python FILE FOLDER), and
kills the process of rank 1 with SIGKILL after twelve steps. At the end there must be 30 steps with
the losses of one process. Ray restarts the workers; your code decides where they resume.
"""

import sys
import tempfile
import time
from pathlib import Path

import ray.train
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn

from drivetrain.learn.notes import note
from drivetrain.learn.training import global_batch, new_model, new_optimizer

NUM_STEPS = 30
SAVE_EVERY = 5


def train_on_each_worker(config: dict) -> None:
    """Ray calls this on every worker, also after a restart."""
    context = ray.train.get_context()
    rank, num_ranks = context.get_world_rank(), context.get_world_size()
    model = prepare_model(new_model())  # torch's DDP around it: gradients are averaged
    optimizer = new_optimizer(model)
    first = 1
    # TODO 1: ray.train.get_checkpoint() is None, or what was reported last. Load model and
    # optimizer from it, and continue with the step after it.
    if ray.train.get_checkpoint() is not None:
        raise NotImplementedError("TODO 1: load the checkpoint")

    for step in range(first, NUM_STEPS + 1):
        inputs, classes = global_batch(step)  # 24 samples, the same on every worker
        # TODO 2: take this rank's part of them.
        raise NotImplementedError("TODO 2: take this rank's part of the batch")

        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), classes)
        loss.backward()
        optimizer.step()
        note(config["folder"], step, rank, num_ranks, loss.item(), model)
        time.sleep(0.2)  # leaves time for a failure
        if step % SAVE_EVERY == 0:
            report(model, optimizer, step, loss.item(), rank)


def report(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: int, loss: float, rank: int
) -> None:
    """Report to Ray. Every worker must call ray.train.report; one of them passes files."""
    with tempfile.TemporaryDirectory() as folder:
        # TODO 3: on rank 0, save everything that the next step depends on into `folder`, and pass
        # it with checkpoint=Checkpoint.from_directory(folder).
        ray.train.report({"step": step, "loss": loss})


def make_trainer(folder: str) -> TorchTrainer:
    # TODO 4: two workers, each on its own node; restart them when one is lost.
    return TorchTrainer(
        train_on_each_worker,
        train_loop_config={"folder": folder},
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(name="lab", storage_path=str(Path(folder).resolve())),
    )


if __name__ == "__main__":
    make_trainer(sys.argv[1]).fit()

"""Ray Train: two workers on two nodes; one of them is killed, and nothing is lost."""

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
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder) / "state.pt", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])  # the momentum is part of the next step
        first = state["step"] + 1

    for step in range(first, NUM_STEPS + 1):
        inputs, classes = global_batch(step)  # 24 samples, the same on every worker
        # The parts are equal, so the mean of the ranks' means is the mean over all samples.
        inputs, classes = inputs[rank::num_ranks], classes[rank::num_ranks]

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
        checkpoint = None
        if rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, Path(folder) / "state.pt")
            checkpoint = Checkpoint.from_directory(folder)
        ray.train.report({"step": step, "loss": loss}, checkpoint=checkpoint)


def make_trainer(folder: str) -> TorchTrainer:
    return TorchTrainer(
        train_on_each_worker,
        train_loop_config={"folder": folder},
        # One CPU each: one worker per node where nodes have one CPU. SPREAD requests it anywhere.
        scaling_config=ScalingConfig(
            num_workers=2, resources_per_worker={"CPU": 1}, placement_strategy="SPREAD"
        ),
        run_config=RunConfig(
            name="lab",
            storage_path=str(Path(folder).resolve()),  # must be visible on all nodes
            # Without this, the first failure ends the run.
            failure_config=FailureConfig(max_failures=3),
        ),
    )


if __name__ == "__main__":
    make_trainer(sys.argv[1]).fit()

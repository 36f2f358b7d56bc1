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
    """Ray calls this on every worker, also when it starts them again."""
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
        # Equal parts: then the mean of the ranks' means is the mean over all samples.
        inputs, classes = inputs[rank::num_ranks], classes[rank::num_ranks]

        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), classes)
        loss.backward()
        optimizer.step()
        note(config["folder"], step, rank, num_ranks, loss.item(), model)
        time.sleep(0.2)  # so that there is time for something to go wrong
        if step % SAVE_EVERY == 0:
            report(model, optimizer, step, loss.item(), rank)


def report(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: int, loss: float, rank: int
) -> None:
    """Tell Ray how far we are. Every worker must call ray.train.report; one hands over files."""
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
        # A CPU each: on nodes with one CPU that means a node each. SPREAD asks for it on any.
        scaling_config=ScalingConfig(
            num_workers=2, resources_per_worker={"CPU": 1}, placement_strategy="SPREAD"
        ),
        run_config=RunConfig(
            name="lab",
            storage_path=str(Path(folder).resolve()),  # all nodes must see it
            # without it, the first failure ends the run
            failure_config=FailureConfig(max_failures=3),
        ),
    )


if __name__ == "__main__":
    make_trainer(sys.argv[1]).fit()

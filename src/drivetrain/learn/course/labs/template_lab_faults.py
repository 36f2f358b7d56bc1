"""A training that works as long as nothing fails. Four things in it do not survive a failure.

    drivetrain train --run-dir runs/faults --nproc-per-node 2 labs/template_lab_faults.py

The check runs it on two hosts: undisturbed, then with a rank killed, a rank killed while it saves,
a host crash, a network cut, and a host that is preempted. Each run must end with the weights of the
undisturbed run, bit for bit; no failure may cost more than ten steps; and curve.csv in the run's
directory must have every step once. Do not change the model, the data or the number of steps.
"""

import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from drivetrain import Hook, Task, Trainer, load_config

GENERATOR = torch.Generator().manual_seed(time.time_ns() % 2**31)


class Curriculum(Hook):
    """Noise on the inputs, a little less after every step."""

    def __init__(self) -> None:
        self.level = 1.0

    def on_train_batch_end(self, trainer, step) -> None:
        self.level *= 0.95


class Curve(Hook):
    """The loss of every step, in a file that a spreadsheet can open."""

    def on_log(self, trainer, metrics) -> None:
        if trainer.is_main:
            with (trainer.run_dir / "curve.csv").open("a") as file:
                for each in metrics:
                    file.write(f"{each.step},{each.loss:.6f}\n")


CURRICULUM = Curriculum()


def loss(model, batch):
    inputs, classes = batch
    time.sleep(0.01)  # leaves time for a failure
    noise = CURRICULUM.level * torch.randn(inputs.shape, generator=GENERATOR)
    return F.cross_entropy(model(inputs + noise), classes)


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 48), nn.Tanh(), nn.Dropout(0.1), nn.Linear(48, 5))


def make_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(192, 12, generator=generator)
    rule = torch.randn(12, 5, generator=generator)
    return TensorDataset(inputs, (inputs @ rule).argmax(dim=1))


def main() -> None:
    config = load_config(
        defaults={
            "name": "faults",
            "global_batch_size": 24,
            "micro_batch_size": 6,
            "max_steps": 40,
            "checkpoint": {"every_steps": 1000},
            "record": {"logging_steps": 1, "progress": "plain", "sinks": []},
        }
    )
    Trainer(Task(make_model, loss), config, hooks=[CURRICULUM, Curve()]).fit(make_data())


if __name__ == "__main__":
    main()

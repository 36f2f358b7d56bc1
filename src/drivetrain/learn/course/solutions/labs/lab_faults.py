"""A training that ends with the same weights, whatever failures happen on the way."""

import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from drivetrain import Hook, Task, Trainer, load_config


class Curriculum(Hook):
    """Noise on the inputs, a little less after every step."""

    level = 1.0

    def on_train_batch_start(self, trainer, step) -> None:
        # Computed from the step, so there is nothing to save and nothing to lose. State that cannot
        # be (a running mean, say) belongs in the hook's state_dict and load_state_dict.
        self.level = 0.95 ** (step - 1)


class Curve(Hook):
    """The loss of every step, in a file that a spreadsheet can open."""

    def on_fit_start(self, trainer) -> None:
        # Steps after the checkpoint are repeated, and so are their lines; the last line may be cut
        # off. A step is logged before it is saved, so the lines that are kept have no gap.
        if trainer.is_main and (trainer.run_dir / "curve.csv").exists():
            lines = (trainer.run_dir / "curve.csv").read_text().splitlines(keepends=True)
            whole = [line for line in lines if line.endswith("\n")]
            kept = [line for line in whole if int(line.split(",")[0]) <= trainer.step_number]
            (trainer.run_dir / "curve.csv").write_text("".join(kept))

    def on_log(self, trainer, metrics) -> None:
        if trainer.is_main:
            with (trainer.run_dir / "curve.csv").open("a") as file:
                for each in metrics:
                    file.write(f"{each.step},{each.loss:.6f}\n")


CURRICULUM = Curriculum()


def loss(model, batch):
    inputs, classes = batch
    time.sleep(0.01)  # leaves time for a failure
    # Drivetrain seeds torch's generator for each step and micro-batch, the same in every attempt.
    noise = CURRICULUM.level * torch.randn(inputs.shape)
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
            "checkpoint": {"every_steps": 5},
            "record": {"logging_steps": 1, "progress": "plain", "sinks": []},
        }
    )
    Trainer(Task(make_model, loss), config, hooks=[CURRICULUM, Curve()]).fit(make_data())


if __name__ == "__main__":
    main()

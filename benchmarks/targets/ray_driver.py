"""One Ray arm of `bench ray`: python -m benchmarks.targets.ray_driver ARM FOLDER."""

from __future__ import annotations

import os
import sys

from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from benchmarks.targets.ray_worker import TIMES, bare_loop
from drivetrain.launch.targets.ray.worker import run_script


def script_loop(config: dict[str, str]) -> None:
    """What `--on ray` runs in each worker."""
    os.environ[TIMES] = config["times"]
    words = ["-m", "benchmarks.targets.ray_worker"]
    run_script({"words": words, "run_dir": config["run_dir"], "working_dir": config["run_dir"]})


def main() -> None:
    """Train once, with two workers."""
    arm, folder = sys.argv[1:]
    trainer = TorchTrainer(
        bare_loop if arm == "bare" else script_loop,
        train_loop_config={"times": os.environ[TIMES], "run_dir": folder},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="ray", storage_path=folder),
    )
    trainer.fit()


if __name__ == "__main__":
    main()

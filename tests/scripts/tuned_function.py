"""A search over a function's argument; what follows it happens once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from drivetrain.compat import DistributedTuner


def train(values: dict[str, Any]) -> dict[str, float]:
    assert values["kind"] == "plain"
    return {"loss": (values["rate"] - 0.3) ** 2 + values["size"] / 1000}


if __name__ == "__main__":
    tuner = DistributedTuner(
        train_fn=train,
        search_space={
            "rate": {"low": 0.0, "high": 1.0},
            "size": [128, 256],
            "kind": "plain",
        },
        num_gpus=2,
        trials_per_gpu=1,
        study=sys.argv[1],
        seed=3,
    )
    best_params = tuner.tune(num_samples=2)
    with Path(sys.argv[1], "best.txt").open("a") as file:
        file.write(f"{sorted(best_params)} {best_params['rate']}\n")

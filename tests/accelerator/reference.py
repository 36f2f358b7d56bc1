"""What the CPU trains: `python -m tests.accelerator.reference STEPS MODEL …`, losses as JSON.

A process of its own, in which torch has not loaded the test accelerator.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from functools import cache

import torch

from tests.ranks.matrix import alone


@cache
def losses_on_cpu(model: str, steps: int) -> list[float]:
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    argv = [sys.executable, "-m", "tests.accelerator.reference", str(steps), model]
    answer = subprocess.run(argv, env=environment, check=True, capture_output=True, text=True)
    losses: list[float] = json.loads(answer.stdout)
    return losses


def main(steps: int, model: str) -> None:
    assert torch.accelerator.current_accelerator() is None
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(alone(model, folder, steps)))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])

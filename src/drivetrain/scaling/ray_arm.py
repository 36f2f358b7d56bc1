"""The Ray Train arm: a TorchTrainer with its own workers.

The loop is the bare one, on a model wrapped by Ray's `prepare_model`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from drivetrain.scaling.request import ScalingRequest, Setting
from drivetrain.scaling.turns import Turns, reach_store

_OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "NODE_")
"""Environment variables of our ranks, which Ray's workers must not inherit."""
_TAIL = 3000
_ASK = "ray/ask"
_PATIENCE = timedelta(hours=2)
_END_S = 60
_PLENTY = 1024
"""CPUs declared to Ray, enough for the workers of any size."""


@dataclass
class RayDriver:
    """Ray on rank 0's node, for the whole benchmark; each size gets new workers."""

    asked: ScalingRequest
    store: Any
    where: tuple[str, int]
    """Host and port of the store, for the workers."""
    process: subprocess.Popen[bytes]
    log: Path
    _number: int = 0

    def start_workers(self, setting: Setting, key: str, turns: Turns) -> None:
        """Start as many workers as ranks, and wait until they are ready."""
        config = {
            "asked": self.asked.to_json(),
            "setting": asdict(setting),
            "store": list(self.where),
            "key": key,
        }
        self.store.set(f"{_ASK}/{self._number}", json.dumps(config))
        self._number += 1
        turns.wait_until_ready(
            lambda: self.process.poll() is None, lambda: self.log.read_text()[-_TAIL:]
        )

    def end(self) -> None:
        self.store.set(f"{_ASK}/{self._number}", "")


@contextmanager
def ray_driver(asked: ScalingRequest, store: Any, where: tuple[str, int]) -> Iterator[RayDriver]:
    """Run Ray in a separate process, without the environment of our ranks."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(_OF_RANKS)}
    # only local; with a token in the user's home, the head would require it
    environment |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        log = Path(folder) / "driver.log"
        command = [sys.executable, "-m", "drivetrain.scaling.ray_arm", *map(str, where), folder]
        with log.open("w") as file:
            process = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
        driver = RayDriver(asked, store, where, process, log)
        try:
            yield driver
        finally:
            driver.end()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.terminate()
                process.wait(_END_S)


def _train_loop(config: dict[str, Any]) -> None:
    """Run one of Ray's workers."""
    import time

    import torch
    import torch.distributed as dist
    from ray.train.torch import get_device, prepare_model

    from drivetrain.parallel.accelerator import accelerator_of
    from drivetrain.scaling.bare import Run
    from drivetrain.scaling.workload import Workload

    if config["threads"]:
        torch.set_num_threads(config["threads"])
    asked = ScalingRequest.from_json(config["asked"])
    workload = Workload(asked, Setting(**config["setting"]))
    device = get_device()
    accelerator, rank = accelerator_of(device), dist.get_rank()
    model = prepare_model(workload.model())
    optimizer = workload.optimizer(model.parameters())
    run = Run(model, optimizer, workload.batches(rank, device))

    def block() -> float:
        dist.barrier()
        began_s = time.perf_counter()
        run(asked.steps_per_block)
        accelerator.synchronize()
        return (time.perf_counter() - began_s) / asked.steps_per_block

    store = reach_store(*config["store"])
    Turns(store, config["key"], workload.setting.num_ranks).take(rank, block, run.losses)


def main() -> None:
    """Arguments HOST PORT FOLDER: run the requested trainings until told to end."""
    import ray
    import torch
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from drivetrain.parallel.accelerator import num_devices

    host, port, folder = sys.argv[1:]
    store = reach_store(host, int(port))
    ray.init(address="local", num_cpus=_PLENTY, include_dashboard=False, _temp_dir=f"{folder}/ray")
    number = 0
    while True:
        store.wait([f"{_ASK}/{number}"], _PATIENCE)
        text = store.get(f"{_ASK}/{number}")
        if not text:
            break
        config = json.loads(text)
        config["threads"] = torch.get_num_threads() if "OMP_NUM_THREADS" in os.environ else 0
        num_workers = config["setting"]["num_ranks"]
        TorchTrainer(
            _train_loop,
            train_loop_config=config,
            scaling_config=ScalingConfig(num_workers=num_workers, use_gpu=num_devices() > 0),
            run_config=RunConfig(name=f"scaling-{number}", storage_path=folder),
        ).fit()
        number += 1
    ray.shutdown()


if __name__ == "__main__":
    main()

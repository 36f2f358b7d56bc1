"""One rank of `benchmarks save`: blocks of steps without a save, with bare DCP's, with ours.

Each block trains the same number of steps; in the saving arms a save begins after the first and is
waited for at the end, so that whatever it takes from the steps is in the block's time.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.nn.parallel import DistributedDataParallel

from benchmarks.steps.interleaved import interleaved
from benchmarks.steps.workloads import LEARNING_RATE, transformer
from drivetrain.checkpoint.checkpointer import Checkpointer
from drivetrain.checkpoint.state import TrainingState
from drivetrain.checkpoint.storage import storage_at
from drivetrain.cluster.environments import detect
from drivetrain.config.schema import Checkpoint, Parallel
from drivetrain.parallel.world import join_world

STEPS_PER_BLOCK, WARM_UP_ROUNDS = 30, 2
Finish = Callable[[], None]


class Training:
    """A model in training, with three ways to save it."""

    def __init__(self, directory: Path) -> None:
        self.world = join_world(detect(), Parallel())
        workload = transformer()
        torch.manual_seed(0)
        self.model = workload.model()
        self.wrapped = (
            DistributedDataParallel(self.model) if self.world.mesh is not None else self.model
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)
        self._loss, self._dataset = workload.loss, workload.dataset()
        self._batch = torch.utils.data.default_collate(
            [self._dataset[i] for i in range(workload.batch_size)]
        )
        self._directory = directory
        self._group = dist.new_group(backend="gloo") if self.world.mesh is not None else None
        rule = Checkpoint(keep_last=1)
        self._checkpointer = Checkpointer(storage_at(directory / "ours"), rule, self.world, "ddp")
        self._checkpointer.claim(0)
        self._num_saves = 0
        self.blocked_s: dict[str, list[float]] = {"bare DCP": [], "drivetrain": []}

    def step(self) -> None:
        """One optimizer step."""
        self._loss(self.wrapped, self._batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save_nothing(self) -> Finish:
        """The yardstick."""
        return lambda: None

    def save_bare(self) -> Finish:
        """As torch's own tutorial does it."""
        began_s = time.perf_counter()
        self._num_saves += 1
        path = self._directory / "bare" / f"{self._num_saves}"
        model, optimizer = get_state_dict(self.model, self.optimizer)
        future: Any = async_save(
            {"model": model, "optimizer": optimizer},
            checkpoint_id=str(path),
            process_group=self._group,
        )
        self.blocked_s["bare DCP"].append(time.perf_counter() - began_s)

        def finish() -> None:
            future.result()
            if self.world.is_main:
                shutil.rmtree(path, ignore_errors=True)

        return finish

    def save_ours(self) -> Finish:
        """With checksums, a manifest, fsync and retention."""
        began_s = time.perf_counter()
        self._num_saves += 1
        state = TrainingState(self.model, self.optimizer, self.world.rank)
        self._checkpointer.save(state, self._num_saves, {})
        self.blocked_s["drivetrain"].append(time.perf_counter() - began_s)

        def finish() -> None:
            saved = self._checkpointer.wait()
            if saved is None or saved.problem:
                raise RuntimeError(f"the save failed: {saved}")

        return finish


def measure(num_rounds: int) -> dict[str, Any]:
    """Seconds per step of each arm, and what a save kept its step waiting for."""
    with tempfile.TemporaryDirectory() as folder:
        shared = [folder]
        if dist.is_initialized():
            dist.broadcast_object_list(shared, src=0)
        training = Training(Path(shared[0]))
        arms = {
            "bare DCP": training.save_bare,
            "bare DCP again": training.save_bare,
            "no checkpoints": training.save_nothing,
            "drivetrain": training.save_ours,
        }
        seconds: dict[str, list[float]] = {name: [] for name in arms}
        for name in interleaved(arms, num_rounds + WARM_UP_ROUNDS):
            if dist.is_initialized():
                dist.barrier()
            os.sync()
            began_s = time.perf_counter()
            training.step()
            finish = arms[name]()
            for _ in range(STEPS_PER_BLOCK - 1):
                training.step()
            finish()
            seconds[name].append((time.perf_counter() - began_s) / STEPS_PER_BLOCK)
        skip = WARM_UP_ROUNDS
        return {
            "seconds": {name: values[skip:] for name, values in seconds.items()},
            "blocked_s": {name: values[skip:] for name, values in training.blocked_s.items()},
        }


def main() -> None:
    """`… OUTPUT NUM_ROUNDS`: rank 0 writes the raw samples as JSON."""
    output, num_rounds = Path(sys.argv[1]), int(sys.argv[2])
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    found = measure(num_rounds)
    if int(os.environ.get("RANK", "0")) == 0:
        ranks = os.environ.get("WORLD_SIZE", "1")
        name = f"transformer, {ranks} rank{'s' if ranks != '1' else ''}"
        output.write_text(json.dumps({name: found["seconds"]}))
        output.with_name(f"blocked-{ranks}.json").write_text(json.dumps(found["blocked_s"]))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

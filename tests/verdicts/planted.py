"""A training script with a fault in it: PLANT=kind:rank:step python tests/verdicts/planted.py

Each fault is one function; the line that a verdict must name carries a mark in a comment.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

from drivetrain.config.load import load_config
from drivetrain.train.hooks import Hook
from drivetrain.train.keep_loop import prepare
from drivetrain.train.task import Task
from drivetrain.train.trainer import Trainer

KIND, _RANK, _STEP = (os.environ.get("PLANT") or "clean:0:0").split(":")
RANK, STEP = int(_RANK), int(_STEP)
WIDTH = int(os.environ.get("PLANT_WIDTH", "32"))
DEPTH = int(os.environ.get("PLANT_DEPTH", "1"))
LENGTH = 1536
BEGUN: list[int] = []
"""Steps this rank has begun; one micro-batch each here."""


def is_now() -> bool:
    """On the chosen rank, in the chosen step."""
    own = int(os.environ.get("RANK", "0"))
    if own == RANK and len(BEGUN) == STEP:
        told = os.environ.get("PLANT_TOLD")
        if told:
            Path(told).write_text(str(time.time()))
        return True
    return False


class Numbers(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Points and what to make of them."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.points = torch.randn(LENGTH, WIDTH, generator=generator)
        self.num_read = 0

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if KIND == "data_worker_stuck":
            self._may_wait()
        if KIND == "slow_disk":
            self._read_from_disk(index)
        self.num_read += 1
        point = self.points[index]
        if KIND == "nan_input" and self._is_now():
            point = point * float("nan")
            Path(os.environ["PLANT_TOLD"]).write_text(str(index))
        return point, point[:1].sin()

    def _is_now(self) -> bool:
        """Four samples a step: the last of the chosen one, on the chosen rank."""
        return int(os.environ.get("RANK", "0")) == RANK and self.num_read == STEP * 4

    def _may_wait(self) -> None:
        if self._is_now():
            Path(os.environ["PLANT_TOLD"]).write_text(str(time.time()))
            time.sleep(1000)  # mark: data_worker_stuck

    def _read_from_disk(self, index: int) -> None:
        descriptor = os.open(os.environ["PLANT_DISK"], os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.pread(descriptor, 1 << 16, (index % 64) << 16)
        os.close(descriptor)


class Model(nn.Module):
    """A few wide layers, and a number that can be made zero."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(DEPTH)]
        self.body, self.head = nn.Sequential(*layers), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        if KIND == "nan_in_module" and int(os.environ["RANK"]) == RANK and len(BEGUN) >= STEP:
            x = (x * 0).log() * 0  # mark: nan_in_module
        out: torch.Tensor = self.head(x)
        return out


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    BEGUN.append(len(BEGUN))
    x, y = batch
    if KIND in FAULTS:
        FAULTS[KIND]()
    error: torch.Tensor = ((model(x) - y) ** 2).mean()
    return error


def sleep_before_collective() -> None:
    if is_now():
        time.sleep(1000)  # mark: sleep_before_collective


def skipped_collective() -> None:
    if not is_now():
        dist.all_reduce(torch.ones(7))  # mark: skipped_collective


def different_shapes() -> None:
    size = (5 if STEP % 2 else 9) if is_now() else 7  # gloo ends whoever is sent too much
    dist.all_reduce(torch.ones(size))  # mark: different_shapes


def worker_exits_0() -> None:
    if is_now():
        os._exit(0)


def crash() -> None:
    if is_now():
        raise ValueError("the labels are out of range")  # mark: crash


def deadlock() -> None:
    if not is_now():
        return
    first, second = threading.Lock(), threading.Lock()
    first.acquire()

    def other_way_round() -> None:
        with second, first:
            pass

    threading.Thread(target=other_way_round, daemon=True).start()
    time.sleep(0.1)
    second.acquire()  # mark: deadlock


def out_of_memory() -> None:
    """For real: the kernel ends the process, by the limit of a control group."""
    if is_now():
        group = Path(os.environ["PLANT_GROUP"])
        (group / "cgroup.procs").write_text(str(os.getpid()))
        held = []
        for _ in range(400):
            held.append(bytearray(b"x" * (8 << 20)))


def cannot_allocate() -> None:
    if is_now():
        torch.empty(1 << 46)  # mark: cannot_allocate


def stopped() -> None:
    if is_now():
        os.kill(os.getpid(), 19)


FAULTS = {
    function.__name__: function
    for function in (
        sleep_before_collective,
        skipped_collective,
        different_shapes,
        worker_exits_0,
        crash,
        deadlock,
        out_of_memory,
        cannot_allocate,
        stopped,
    )
}


class SlowFrom(Hook):
    """From a step on this rank gets less of the processor, by a control group's quota."""

    def on_train_batch_start(self, trainer: Trainer, step: int) -> None:
        is_it = step == STEP + 1 and int(os.environ["RANK"]) == RANK
        if KIND.startswith("slow_rank") and is_it:
            (Path(os.environ["PLANT_GROUP"]) / "cgroup.procs").write_text(str(os.getpid()))


class Drifting(Hook):
    """One rank's weights change behind everybody's back."""

    def on_train_batch_end(self, trainer: Trainer, step: int) -> None:
        if KIND == "drift" and step == STEP + 1 and int(os.environ["RANK"]) == RANK:
            with torch.no_grad():
                next(trainer.model.parameters())[0] += 1e-3


def own_loop(config: Any) -> None:
    """A loop of one's own with data of one's own, which ends earlier on one rank."""
    model = Model()
    loop = prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3), Numbers(), config)
    own = iter(range(STEP if int(os.environ["RANK"]) == RANK else 10_000))
    for step in loop.steps():
        if next(own, None) is None:
            sys.exit(0)
        for batch in step:
            loop.backward(loss(loop.model, batch))  # mark: uneven_data_end
        loop.step()


def main() -> None:
    config = load_config(
        defaults={
            "global_batch_size": 12,
            "max_steps": 40,
            "checkpoint": {"every_steps": None},
            "record": {"progress": "none", "sinks": [], "logging_steps": 5},
            "data": {"num_workers": 1 if KIND == "data_worker_stuck" else 0},
            "sentinel": {"every_steps": 5 if KIND == "drift" else None},
        }
    )
    if KIND == "uneven_data_end":
        own_loop(config)
    else:
        Trainer(Task(model=Model, loss=loss), config, hooks=[SlowFrom(), Drifting()]).fit(Numbers())


if __name__ == "__main__":
    main()

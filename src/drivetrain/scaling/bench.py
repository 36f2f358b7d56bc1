"""One rank of `drivetrain bench scaling`; rank 0 prints each size when it is done.

All ranks are started once. For each size, that many ranks form a process group, in which every arm
trains: `Trainer.fit` leads, and after each of its blocks the other arms run one block. So a round
has a block of every arm, seconds apart, in the same processes.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from drivetrain._version import __version__
from drivetrain.cluster.environments import detect
from drivetrain.collectives.show import as_typed, say
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.parallel.accelerator import Accelerator, accelerator_of, use_device_of
from drivetrain.scaling import bare
from drivetrain.scaling.predict import Exchanges, measure_exchanges, predictions
from drivetrain.scaling.ray_arm import RayDriver, ray_driver
from drivetrain.scaling.request import (
    AGAIN,
    BARE,
    LOSS_STEPS,
    OURS,
    STRATEGIES,
    ArmSamples,
    ScalingRequest,
    Setting,
    SizeResult,
    lines_of,
    loss_difference,
    resolved,
    results_document,
)
from drivetrain.scaling.show import heading, line, plot, summary
from drivetrain.scaling.turns import Turns, open_store, reach_store
from drivetrain.scaling.workload import Workload, loss_of
from drivetrain.train.hooks import Hook
from drivetrain.train.task import Task
from drivetrain.train.trainer import Trainer

_PATIENCE = timedelta(hours=2)
"""Timeout of ranks that wait because they are not in a size."""
Block = Callable[[], float]
"""Runs an arm's next block and returns seconds per step."""


class Rounds(Hook):
    """Times Trainer's own blocks, and runs every other arm between them."""

    def __init__(self, others: dict[str, Block], steps_per_block: int, device: Accelerator) -> None:
        self.seconds: dict[str, list[float]] = {name: [] for name in (OURS, *others)}
        self._others, self._size, self._accelerator = others, steps_per_block, device
        self._steps, self._began_s = 0, 0.0
        self._shuffle = random.Random(0)  # noqa: S311 - the same order on every rank

    def on_fit_start(self, trainer: Trainer) -> None:
        del trainer
        self._begin()

    def on_train_batch_end(self, trainer: Trainer, step: int) -> None:
        del trainer, step
        self._steps += 1
        if self._steps % self._size:
            return
        self._accelerator.synchronize()  # so that the clock measures the device's work
        self.seconds[OURS].append((time.perf_counter() - self._began_s) / self._size)
        order = list(self._others)
        self._shuffle.shuffle(order)
        for name in order:
            self.seconds[name].append(self._others[name]())
        self._begin()

    def _begin(self) -> None:
        dist.barrier()
        self._began_s = time.perf_counter()


def timed(run: bare.Run, steps: int, accelerator: Accelerator) -> Block:
    def block() -> float:
        dist.barrier()
        began_s = time.perf_counter()
        run(steps)
        accelerator.synchronize()
        return (time.perf_counter() - began_s) / steps

    return block


@dataclass
class Arms:
    """The arms of one of our strategies at one setting: their blocks and losses by name."""

    blocks: dict[str, Block] = field(default_factory=dict)
    losses: dict[str, Callable[[], list[float]]] = field(default_factory=dict)

    def add(self, name: str, run: bare.Run, steps: int, accelerator: Accelerator) -> None:
        self.blocks[name], self.losses[name] = timed(run, steps, accelerator), run.losses


@dataclass(frozen=True)
class Bench:
    """This rank, and what all ranks share."""

    asked: ScalingRequest
    accelerator: Accelerator
    rank: int
    store: Any
    """Connects all ranks, at every size."""
    turns_store: Any
    """Also connects processes of other libraries."""
    ray: RayDriver | None = None
    """On rank 0, if Ray Train takes part."""

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def measure(self, setting: Setting, key: str, result: SizeResult) -> Exchanges | None:
        """Measure all arms of all strategies, on every rank of the size; return exchange times."""
        workload = Workload(self.asked, setting)
        found: Exchanges | None = None
        with _group(self.store, key, self.rank, setting.num_ranks, self.accelerator):
            if setting.num_ranks > 1:
                size = sum(p.numel() * p.element_size() for p in workload.model().parameters())
                found = measure_exchanges(setting.num_ranks, size, self.accelerator)
            count = min(LOSS_STEPS, workload.num_steps)
            alone = workload.losses_of_one_process(self.accelerator.device, count)
            for strategy in self.asked.strategies:
                self._measure_strategy(strategy, workload, key, alone, result)
        return found

    def _measure_strategy(
        self, strategy: str, workload: Workload, key: str, alone: list[float], result: SizeResult
    ) -> None:
        asked, accelerator = self.asked, self.accelerator
        arms = Arms()
        with ExitStack() as stack:
            for name in (BARE, AGAIN):
                run = bare.bare_run(strategy, workload, accelerator)
                arms.add(name, run, asked.steps_per_block, accelerator)
            if strategy == STRATEGIES[0]:
                self._add_others(arms, workload, f"{key}/ray", stack)
            ours = self._fit(strategy, workload, arms, stack)
            losses = {OURS: ours[1], **{name: get() for name, get in arms.losses.items()}}
        for arm, seconds in ours[0].items():
            one = result.arms.setdefault(f"{strategy} {arm}", ArmSamples(strategy, arm))
            one.seconds += seconds[1:]  # the first block warms up
            apart = loss_difference(losses[arm][: len(alone)], alone)
            one.loss_difference = max(one.loss_difference, apart)

    def _add_others(self, arms: Arms, workload: Workload, key: str, stack: ExitStack) -> None:
        if "horovod" in self.asked.beside and workload.setting.num_ranks > 1:
            run = bare.horovod_run(workload, self.accelerator)
            stack.callback(bare.leave_horovod)
            arms.add("horovod", run, self.asked.steps_per_block, self.accelerator)
        if "ray" not in self.asked.beside:
            return
        turns = Turns(self.turns_store, key, workload.setting.num_ranks)
        if self.ray is not None:
            self.ray.start_workers(workload.setting, key, turns)
        number = iter(range(sys.maxsize))
        arms.blocks["ray"] = lambda: turns.block(next(number), is_main=self.is_main)
        arms.losses["ray"] = lambda: turns.end(next(number), is_main=self.is_main)
        dist.barrier()  # until they are ready

    def _fit(
        self, strategy: str, workload: Workload, arms: Arms, stack: ExitStack
    ) -> tuple[dict[str, list[float]], list[float]]:
        """Run `Trainer.fit` with the other arms in between; return their seconds and its losses."""
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="scaling-"))
        rounds = Rounds(arms.blocks, self.asked.steps_per_block, self.accelerator)
        config = {
            "global_batch_size": workload.setting.global_batch,
            "micro_batch_size": workload.setting.rank_batch,
            "max_steps": workload.num_steps,
            "output_dir": folder,
            "data": {"shuffle": False},
            "parallel": {"strategy": strategy},
            "checkpoint": {"every_steps": None},  # the other arms save nothing either
            "record": {"logging_steps": self.asked.steps_per_block, "progress": "none"},
        }
        task = Task(workload.model, loss_of, optimizer=workload.optimizer)
        history = Trainer(task, config, [rounds]).fit(workload.dataset())
        return rounds.seconds, [each.loss for each in history.steps]


@contextmanager
def _group(
    store: Any, key: str, rank: int, num_ranks: int, accelerator: Accelerator
) -> Iterator[None]:
    """Make the first `num_ranks` ranks the whole world inside the context."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    here = max(1, min(local, num_ranks - rank // local * local))
    known = {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(here)}
    before = {name: os.environ.get(name) for name in known}
    os.environ.update(known)
    dist.init_process_group(
        accelerator.backend, store=PrefixStore(key, store), rank=rank, world_size=num_ranks
    )
    try:
        yield
        dist.barrier()
    finally:
        dist.destroy_process_group()
        os.environ.update({name: value for name, value in before.items() if value is not None})


def run(asked: ScalingRequest) -> list[SizeResult]:
    """Run the benchmark on every rank; only rank 0 prints and has complete results."""
    identity = detect()
    accelerator = accelerator_of(use_device_of(identity.local_rank))
    sizes, batch_size = resolved(asked, identity.world_size)
    _refuse(asked, accelerator, identity.world_size > identity.local_world_size)
    store, rank, _ = next(rendezvous("env://"))
    turns_store, where = _shared_store(rank, store, identity.main_address)
    about = {
        "drivetrain": __version__,
        "torch": torch.__version__,
        "backend": accelerator.backend.rpartition(":")[2],
        "device": accelerator.name,
        "processors": os.cpu_count(),
        "batch size": batch_size,
    }
    is_main = rank == 0
    if is_main:
        for text in heading(asked, about):
            say(text)
    with ExitStack() as stack:
        ray = None
        if "ray" in asked.beside and is_main:
            ray = stack.enter_context(ray_driver(asked, turns_store, where))
        bench = Bench(asked, accelerator, rank, store, turns_store, ray)
        results = [
            each for mode in asked.modes for each in _measure_mode(bench, mode, sizes, batch_size)
        ]
    if is_main:
        for text in summary(lines_of(results)):
            say(text)
        _write(asked, results, about)
    return results


def _refuse(asked: ScalingRequest, accelerator: Accelerator, has_nodes: bool) -> None:
    problems = []
    if asked.emulate_compute_ms is not None and not accelerator.is_cpu:
        rule = f"{accelerator.name} runs on its own, so a waiting host does not emulate it"
        remedy = "leave it out"
        problems.append(Problem("--emulate-compute", rule, remedy, asked.emulate_compute_ms))
    if "ray" in asked.beside and has_nodes:
        rule = "runs on one node only"
        problems.append(Problem("--beside", rule, "leave ray out on several nodes", "ray"))
    if problems:
        raise ConfigError(problems)


def _shared_store(rank: int, store: Any, host: str) -> tuple[Any, tuple[str, int]]:
    """Open a store on rank 0; return it with its address, also for processes that are no ranks."""
    if rank == 0:
        opened = open_store(host)
        store.set("scaling/port", str(opened.port))
    else:
        opened = reach_store(host, int(store.get("scaling/port")))
    return opened, (host, opened.port)


def _measure_mode(
    bench: Bench, mode: str, sizes: tuple[int, ...], batch_size: int
) -> list[SizeResult]:
    results = {size: SizeResult(Setting(mode, size, batch_size)) for size in sizes}
    exchanges: dict[int, Exchanges | None] = {}
    for number in range(bench.asked.passes):
        for size in sizes if number % 2 == 0 else reversed(sizes):
            key = f"scaling/{mode}/{number}/{size}"
            if bench.rank < size:
                found = bench.measure(results[size].setting, key, results[size])
                exchanges.setdefault(size, found)
            # waiting on a store: a rank that is not needed uses no CPU time
            if bench.is_main:
                bench.store.set(f"{key}/done", "1")
            bench.store.wait([f"{key}/done"], _PATIENCE)
            if bench.is_main:
                say(f"# {mode}, pass {number + 1} of {bench.asked.passes}: {size} ranks done")
    if bench.is_main:
        _predict(bench, results, exchanges)
        for each in lines_of(list(results.values())):
            say(line(each))
    return list(results.values())


def _predict(
    bench: Bench, results: dict[int, SizeResult], exchanges: dict[int, Exchanges | None]
) -> None:
    alone = {
        one.strategy: median(one.seconds) for one in results[1].arms.values() if one.arm == BARE
    }
    for size, result in results.items():
        workload = Workload(bench.asked, result.setting)
        result.predicted_s = predictions(
            workload, alone, exchanges[size], is_cpu=bench.accelerator.is_cpu
        )


def _write(asked: ScalingRequest, results: list[SizeResult], about: dict[str, Any]) -> None:
    if asked.json_file is not None:
        document = results_document(asked, results, about)
        Path(asked.json_file).write_text(json.dumps(document, indent=1) + "\n")
        say(f"# written: {as_typed(Path(asked.json_file))}")
    if asked.plot_file is not None:
        plot(lines_of(results), asked, about, Path(asked.plot_file))
        say(f"# written: {as_typed(Path(asked.plot_file))}")


def main() -> None:
    warnings.filterwarnings("ignore")  # the engines warn about small models
    results = run(ScalingRequest.from_json(sys.argv[1]))
    if detect().is_main and not all(each.is_same_training for each in lines_of(results)):
        sys.exit(1)


if __name__ == "__main__":
    main()

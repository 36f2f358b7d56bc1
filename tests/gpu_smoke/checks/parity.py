"""The parity matrix's layouts, on devices.

Two tolerances, for two reasons. Against one device only the sums over ranks and the shapes of
products differ: the same kernels, at times another of cuBLAS's for the other shape (1e-5; the
matrix on CPUs stays below 1e-7). Against the CPU every kernel adds in another order and has an exp
of its own, and AdamW divides small gradients by their own size (1e-4). TF32 would show in both:
its factors have 10 bits.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from drivetrain.core.errors import WorkerFailure
from drivetrain.parallel.accelerator import accelerator_type, num_devices
from drivetrain.testing import run_ranks
from tests.gpu_smoke.devices import (
    FOLDER,
    backend,
    is_cut,
    left_s,
    without_accelerator,
    without_tf32,
)
from tests.gpu_smoke.rows import FAIL, SKIPPED, Row, judged
from tests.ranks.matrix import FSDP, LAYOUTS, Parallel, alone, train
from tests.ranks.training import largest_deviation

STEPS = 8
FROM_ONE_DEVICE, FROM_CPU = 1e-5, 1e-4
MODELS = ("gpt", "resnet")
OF_ENGINES = ("deepspeed", "horovod")
KNOWN_TO_DEEPSPEED = ("cuda", "xpu")
Cell = tuple[str, str, Parallel]
"""Name, model, layout."""


def one_device() -> Iterator[Row]:
    for model in MODELS:
        yield _judge(f"{model}, one device", references()[model]["device"], model)


def layouts(world_size: int) -> Iterator[Row]:
    names = [name for name, (ranks, _) in LAYOUTS.items() if ranks == world_size]
    own = [name for name in names if not name.startswith(OF_ENGINES)]
    cells: list[Cell] = [(name, "gpt", LAYOUTS[name][1]) for name in own]
    if world_size == 2:  # convolutions and running statistics
        cells += [(f"{name}, resnet", "resnet", LAYOUTS[name][1]) for name in ("ddp", "fsdp")]
    yield from _compared(cells, world_size)


def all_devices() -> Iterator[Row]:
    """What the matrix has no layouts for."""
    count = num_devices()
    if count == 4:
        yield Row("all", SKIPPED, "4 devices: done above")
        return
    cells: list[Cell] = [("ddp", "gpt", {"strategy": "ddp"}), ("fsdp", "gpt", FSDP)]
    if count % 8 == 0:
        cells.append(("fsdp×tp×pp", "gpt", {**FSDP, "tp": 2, "pp": 2}))
    yield from _compared(cells, count)


def deepspeed() -> Iterator[Row]:
    if find_spec("deepspeed") is None or accelerator_type() not in KNOWN_TO_DEEPSPEED:
        reason = f"not installed, or does not know {accelerator_type()}"
        yield Row("all", SKIPPED, reason)
        return
    names = ("deepspeed 1", "deepspeed 2", "deepspeed 3")
    yield from _compared([(name, "gpt", LAYOUTS[name][1]) for name in names], 2)


def references() -> dict[str, dict[str, list[float]]]:
    """By model: losses of one process on the CPU, and on one device. Trained once per report."""
    path = Path(os.environ[FOLDER]) / "references.json"
    if not path.exists():
        found = {model: {"cpu": _on_cpu(model)} for model in MODELS}
        for name, losses in _trained([(model, model, {}) for model in MODELS], 1):
            if isinstance(losses, str):
                raise WorkerFailure(f"{name} on one device: {losses}")
            found[name]["device"] = losses
        path.write_text(json.dumps(found))
    loaded: dict[str, dict[str, list[float]]] = json.loads(path.read_text())
    return loaded


def _compared(cells: Sequence[Cell], world_size: int) -> Iterator[Row]:
    model_of = {name: model for name, model, _ in cells}
    references()
    for name, losses in _trained(cells, world_size):
        if isinstance(losses, str):
            last = losses.strip().splitlines()[-1]
            yield Row(name, FAIL, last, f"{name}:\n\n```\n{losses[-2500:]}\n```")
        else:
            yield _judge(name, losses, model_of[name])


def _judge(name: str, losses: list[float], model: str) -> Row:
    reference = references()[model]
    here = largest_deviation(losses, reference["device"])
    there = largest_deviation(losses, reference["cpu"])
    figure = (
        f"{here:.1e} from one device (allowed {FROM_ONE_DEVICE:.0e}), "
        f"{there:.1e} from the CPU ({FROM_CPU:.0e})"
    )
    return judged(name, here <= FROM_ONE_DEVICE and there <= FROM_CPU, figure)


def _trained(cells: Sequence[Cell], world_size: int) -> Iterator[tuple[str, list[float] | str]]:
    """Name and losses, or an error; where one fails, the others go on in a world of their own."""
    waiting = list(cells)
    with TemporaryDirectory(prefix="gpu-smoke-") as folder:
        done = Path(folder) / "losses.jsonl"
        while waiting:
            done.write_text("")
            failure: WorkerFailure | None = None
            args = (folder, waiting, str(done))
            timeout_s = min(left_s(), 60 + 15 * len(waiting))
            try:
                run_ranks(train_cells, world_size, timeout_s, args, backend())
            except WorkerFailure as error:
                failure = error
            for line in done.read_text().splitlines():
                waiting.pop(0)
                name, losses = json.loads(line)
                yield name, losses
            if failure is not None and is_cut():
                raise failure
            if failure is not None:  # in the next one, or after the last when ranks part
                yield waiting.pop(0)[0] if waiting else "parting", str(failure)


def train_cells(output_dir: str, cells: Sequence[Cell], done: str) -> None:
    """On every rank; the first one writes down what is through."""
    without_tf32()
    for name, model, parallel in cells:
        losses = train(model, output_dir, parallel, STEPS)[0]
        assert torch.accelerator.max_memory_allocated() > 0, "nothing was on the device"
        if dist.get_rank() == 0:
            with open(done, "a") as file:
                file.write(json.dumps([name, losses]) + "\n")


def _on_cpu(model: str) -> list[float]:
    words = [sys.executable, "-m", __name__, model]
    answer = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True, timeout=left_s())
    losses: list[float] = json.loads(answer.stdout.splitlines()[-1])
    return losses


def _main(model: str) -> Any:
    without_accelerator()
    with TemporaryDirectory() as folder:
        print(json.dumps(alone(model, folder, STEPS)))


if __name__ == "__main__":
    _main(sys.argv[1])

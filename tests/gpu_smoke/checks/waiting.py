"""Whether a step makes the host wait for the device, by the device's own means.

CUDA's (`set_sync_debug_mode`) sees copies, item() and the like, and nothing in torch.distributed;
the test accelerator counts every wait.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

from drivetrain.testing import run_ranks
from drivetrain.train.hooks import Hook
from drivetrain.train.trainer import Trainer
from tests.gpu_smoke.devices import backend, device_module, fits, left_s
from tests.gpu_smoke.rows import SKIPPED, Row, judged
from tests.ranks.matrix import LAYOUTS, config
from tests.ranks.models import task_of

FIRST, LAST = 3, 7
"""Steps that are watched: the first ones set up, and none of these logs."""
CHOSEN = {1: ["one device"], 2: ["ddp", "fsdp", "tp", "cp", "pp 1f1b"], 4: ["hsdp", "fsdp×tp"]}


def rows() -> Iterator[Row]:
    module = device_module()
    if not any(
        hasattr(module, name) for name in ("watching_synchronizations", "set_sync_debug_mode")
    ):
        yield Row("all", SKIPPED, "the device's module cannot tell")
        return
    for world_size, layouts in CHOSEN.items():
        if not fits(world_size):
            continue
        with TemporaryDirectory(prefix="gpu-smoke-") as folder:
            ranks = run_ranks(waits, world_size, left_s(), (folder, layouts), backend())
        for layout in layouts:
            seen = Counter(cause for rank in ranks for cause in rank[layout])
            steps = (LAST - FIRST + 1) * world_size
            figure = f"{seen.total() / steps:.1f} per step and rank"
            shown = "; ".join(f"{number} × {cause}" for cause, number in seen.most_common(5))
            yield judged(layout, not seen, f"{figure} {shown}".strip())


class Watch(Hook):
    """Notes what makes the host wait in steps FIRST to LAST."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_start(self, trainer: Trainer, step: int) -> None:
        if step - 1 == FIRST:
            self._watching = watching()
            self.seen = self._watching.__enter__()

    def on_train_batch_end(self, trainer: Trainer, step: int) -> None:
        if step - 1 == LAST:
            self._watching.__exit__(None, None, None)


def waits(output_dir: str, layouts: list[str]) -> dict[str, list[str]]:
    """By layout: cause and line of every wait on this rank."""
    found = {}
    for layout in layouts:
        task, data = task_of("gpt")
        settings = config(output_dir, LAST + 2, LAYOUTS[layout][1] if layout in LAYOUTS else {})
        settings["record"] = {"progress": "none", "sinks": [], "logging_steps": 100}
        watch = Watch()
        Trainer(task, settings, hooks=[watch]).fit(data)
        found[layout] = [f"{cause} at {where}" for cause, where in watch.seen]
    return found


@contextmanager
def watching() -> Iterator[list[Any]]:
    """(cause, file:line) of every wait while this is open."""
    module = device_module()
    if hasattr(module, "watching_synchronizations"):
        with module.watching_synchronizations() as seen:
            yield seen
        return
    noted: list[tuple[str, str]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_, **__: noted.append((str(message), _caller()))
        module.set_sync_debug_mode("warn")
        try:
            yield noted
        finally:
            module.set_sync_debug_mode("default")
    noted[:] = [note for note in noted if "synchroniz" in note[0]]


def _caller() -> str:
    """The innermost frame outside torch."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if "/torch/" not in path and not path.endswith("warnings.py") and path != __file__:
            return f"{path}:{frame.f_lineno}"
        frame = frame.f_back
    return "a thread without Python"

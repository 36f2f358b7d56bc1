"""What real ranks send in a step: every operator of torch's collectives, over gloo."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from drivetrain.rehearse.calls import NAMESPACES, RehearsedCall, describe
from drivetrain.train.hooks import Hook

SCRIPT = Path(__file__).parents[1] / "scripts" / "planted.py"
CALLS: list[RehearsedCall] = []


class _Listening(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        made = func(*args, **(kwargs or {}))
        if getattr(func, "namespace", "") in NAMESPACES:
            call = describe(func, args, kwargs or {}, made, None)
            if call is not None:
                CALLS.append(call)
        return made


class Recording(Hook):
    """Listens during the run's second step."""

    def __init__(self) -> None:
        self._mode: Any = _Listening()  # type: ignore[no-untyped-call]

    def on_train_batch_start(self, trainer: Any, step: int) -> None:
        if step == 2:
            self._mode.__enter__()

    def on_train_batch_end(self, trainer: Any, step: int) -> None:
        if step == 2:
            self._mode.__exit__(None, None, None)


def train_and_record(words: tuple[str, ...], folder: str) -> list[RehearsedCall]:
    """One real rank's calls in its second step."""
    os.environ["DRIVETRAIN_HOOKS"] = "tests.rehearse.recorded:Recording"
    sys.argv = [str(SCRIPT), "nothing", *words, "max_steps=2", f"output_dir={folder}"]
    runpy.run_path(str(SCRIPT), run_name="__main__")
    return CALLS

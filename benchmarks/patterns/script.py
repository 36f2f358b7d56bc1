"""What a process of a run does: the script itself, watched from outside. Imports little."""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PRINTED, ONCE = "printed.txt", "killed-once"


def run_script(folder: str, script: str, words: Sequence[str], kill_at: int | None = None) -> None:
    """Run it as `python SCRIPT WORDS` would, in `folder`; its first rank's output is kept there.

    The last rank kills itself (SIGKILL) before its `kill_at`-th optimizer step, once in a folder.
    """
    import torch

    torch.set_num_threads(1)
    rank, num_ranks = (int(os.environ.get(name, one)) for name, one in _RANK)
    os.chdir(folder)
    with Path(PRINTED if rank == 0 else f"{PRINTED}.{rank}").open("a") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        if kill_at is not None and rank == num_ranks - 1 and not Path(ONCE).exists():
            _kill_before(kill_at)
        sys.argv = [script, *words]
        sys.path.insert(0, str(Path(script).parent))
        runpy.run_path(script, run_name="__main__")
        sys.stdout.flush()


_RANK = (("RANK", "0"), ("WORLD_SIZE", "1"))


def _kill_before(step: int) -> None:
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    left = iter(range(step - 1, -1, -1))

    def count(*_: Any) -> None:
        if next(left) == 0:
            Path(ONCE).touch()
            os.kill(os.getpid(), signal.SIGKILL)

    register_optimizer_step_pre_hook(count)


def run_watched(folder: str, script: str, words: Sequence[str]) -> None:
    """The same, and every step's loss as `backward` had it: for scripts that print none."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    losses: list[float] = []
    parts: list[float] = []
    backward = torch.Tensor.backward

    def watched(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        parts.append(loss.item())  # divided by the accumulation already
        backward(loss, *args, **kwargs)  # type: ignore[no-untyped-call]

    def stepped(*_: Any) -> None:
        losses.append(sum(parts))
        parts.clear()

    torch.Tensor.backward = watched  # type: ignore[method-assign, assignment]
    register_optimizer_step_post_hook(stepped)
    run_script(folder, script, words)
    with (Path(folder) / PRINTED).open("a") as output:
        print("\nlosses", json.dumps(losses), file=output)

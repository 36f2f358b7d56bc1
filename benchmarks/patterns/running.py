"""One run of a script: its curve, its lives and its weights.

Ranks are forked from one process that has imported what takes seconds (`run_ranks`), not started
by `drivetrain train`: 60 runs take minutes. A killed run is resumed by the same call.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.patterns.compare import Curve
from benchmarks.patterns.script import ONCE, PRINTED, run_script
from drivetrain.checkpoint.export import export_weights
from drivetrain.checkpoint.locate import locate
from drivetrain.core.errors import WorkerFailure
from drivetrain.record.reading import open_run
from drivetrain.record.session import RUN_DIR
from drivetrain.testing import run_ranks

_EVERY_STEPS = 5
_IMPORTED_ONCE = [
    "torch._dynamo",
    "torch.distributed.fsdp",
    "drivetrain.train.trainer",
    "drivetrain.train.several_loop",
    "sklearn.datasets",
    "transformers.models.gpt2.modeling_gpt2",
]


@dataclass(frozen=True)
class Arm:
    """How a moved script is run."""

    name: str
    num_ranks: int
    strategy: str | None
    is_killed: bool = False

    @property
    def words(self) -> tuple[str, ...]:
        settings = (
            f"checkpoint.every_steps={_EVERY_STEPS}",
            "record.logging_steps=1",
            "record.sinks=[]",
        )
        return (*settings, f"parallel.strategy={self.strategy}") if self.strategy else settings


ARMS = (
    Arm("1", 1, None),
    Arm("ddp 2", 2, "ddp"),
    Arm("fsdp 2", 2, "fsdp"),
    Arm("1, killed", 1, None, is_killed=True),
    Arm("ddp 2, killed", 2, "ddp", is_killed=True),
    Arm("fsdp 2, killed", 2, "fsdp", is_killed=True),
)


@dataclass(frozen=True)
class Outcome:
    """Of a moved script."""

    curve: Curve
    resumed_at: tuple[int, ...]
    """After which step each further life began."""
    weights_sha256: str


def prepare_processes() -> None:
    """From here on processes are forked from one that has these."""
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    multiprocessing.set_forkserver_preload(_IMPORTED_ONCE)


def original(
    script: Path,
    folder: Path,
    words: Sequence[str] = (),
    run: Callable[[str, str, Sequence[str]], None] = run_script,
) -> Curve:
    """One process, without Drivetrain."""
    folder.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=run, args=(str(folder), str(script), tuple(words)))
    process.start()
    process.join()
    output = (folder / PRINTED).read_text()
    if process.exitcode:
        raise SystemExit(f"{script}: exit code {process.exitcode}\n{output[-4000:]}")
    return printed(output)


def moved(arm: Arm, script: Path, folder: Path, kill_at: int, words: Sequence[str] = ()) -> Outcome:
    """The same under Drivetrain; a killed run is started again as it was."""
    folder.mkdir(parents=True, exist_ok=True)
    run_dir = folder / "run"
    os.environ[RUN_DIR] = str(run_dir)
    argv = (str(folder), str(script), (*words, *arm.words), kill_at if arm.is_killed else None)
    try:
        run_ranks(run_script, arm.num_ranks, args=argv)
    except WorkerFailure as failure:
        if not (folder / ONCE).exists():
            raise SystemExit(f"{script} ({arm.name})\n{_tail(folder)}") from failure
        run_ranks(run_script, arm.num_ranks, args=argv)
    finally:
        del os.environ[RUN_DIR]
    run = open_run(run_dir)
    series = run.scalars()["train/loss"]
    lives = tuple(attempt.resumed_step for attempt in run.attempts()[1:])
    if arm.is_killed != bool(lives) or 0 in lives:
        raise SystemExit(f"{script} ({arm.name}): further lives began after steps {lives}")
    # what a killed process was about to write down is lost: its curve begins where it resumed
    losses = {int(s): float(v) for s, v in zip(series.steps, series.values, strict=True)}
    first = max((0, *lives)) + 1
    if not set(range(first, max(losses) + 1)) <= losses.keys():
        raise SystemExit(f"{script} ({arm.name}): steps {sorted(losses)}, resumed after {lives}")
    found = printed((folder / PRINTED).read_text(), needs_losses=False)
    curve = Curve([losses[step] for step in range(first, max(losses) + 1)], found.metrics)
    return Outcome(curve, lives, _weights_of(run_dir, folder / "exported.pt"))


def _tail(folder: Path) -> str:
    return "\n".join(file.read_text()[-3000:] for file in sorted(folder.glob(f"{PRINTED}*")))


def printed(output: str, *, needs_losses: bool = True) -> Curve:
    """What a script says on lines that begin with `losses` and `metrics`."""
    losses = re.findall(r"^losses (\[.*\])$", output, re.MULTILINE)
    metrics = re.findall(r"^metrics (\{.*\})$", output, re.MULTILINE)
    if needs_losses and not losses:
        raise SystemExit(f"no losses in:\n{output}")
    return Curve(_last(losses, []), _last(metrics, {}))


def _last(found: list[str], default: Any) -> Any:
    return json.loads(found[-1]) if found else default


def _weights_of(run_dir: Path, target: Path) -> str:
    """A digest of the newest checkpoint's weights, whatever layout it was saved in."""
    located = locate(str(run_dir))
    export_weights(located.storage, located.choose(), target, form="pt")
    return digest(torch.load(target))


def digest(weights: Mapping[str, torch.Tensor]) -> str:
    found = hashlib.sha256()
    for name in sorted(weights):
        found.update(name.encode())
        found.update(weights[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()

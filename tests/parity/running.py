"""Bodies that run on ranks, and what a certificate says of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from drivetrain.config.keys import unflatten
from drivetrain.testing import run_ranks
from drivetrain.train.trainer import Trainer
from drivetrain.verify.parity.compare import (
    TOLERANCES,
    Divergence,
    Numbers,
    Parting,
    StepNumbers,
    first_parting,
    locate,
)
from drivetrain.verify.parity.layouts import parse_layouts
from drivetrain.verify.parity.trace import Trace, TraceEntry, read_trace
from tests.parity.mutants import MUTANTS
from tests.parity.workload import SETTINGS, make_data, make_task

HEALTHY = "healthy"
ALLOWED = TOLERANCES["fp32"]


@dataclass(frozen=True)
class Seen:
    """A run as a certificate sees it."""

    numbers: Numbers
    traces: Mapping[int, Sequence[TraceEntry]]


def train(folder: str, name: str, overrides: Sequence[str]) -> dict[int, StepNumbers]:
    """One run with a mutant, or a healthy one; its traces lie in the folder."""
    flat = dict(word.split("=") for word in overrides)
    changes: dict[str, Any] = unflatten(
        {key: int(value) if value.isdigit() else value for key, value in flat.items()}
    )
    config = {
        **SETTINGS,
        "sentinel": {"every_steps": None},  # as in a certificate: it would end a drifting run
        **changes,
        "output_dir": f"{folder}/runs",
    }
    trace = Trace(Path(folder) / name, SETTINGS["max_steps"])
    hooks = [trace] if name == HEALTHY else [MUTANTS[name](), trace]
    history = Trainer(make_task(), config, hooks).fit(make_data())
    return {m.step: StepNumbers(m.loss, m.grad_norm) for m in history.steps}


def train_all(
    folder: str, names: Sequence[str], overrides: Sequence[str]
) -> dict[str, dict[int, StepNumbers]]:
    """One after the other in one world: ranks are started once."""
    return {name: train(folder, name, overrides) for name in names}


def see_reference(folder: Path) -> Seen:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    numbers = train(str(folder), HEALTHY, ())
    torch.set_num_threads(threads)
    return Seen(numbers, _traces(folder / HEALTHY))


def see_layout(folder: Path, layout: str, names: Sequence[str]) -> dict[str, Seen]:
    (asked,) = parse_layouts(layout)
    by_name = run_ranks(
        train_all, asked.num_ranks, 500, args=(str(folder), tuple(names), asked.overrides)
    )[0]
    return {name: Seen(numbers, _traces(folder / name)) for name, numbers in by_name.items()}


def verdict(reference: Seen, here: Seen) -> tuple[Parting | None, Divergence | None]:
    """What the certificate would say: whether they part, and where that began."""
    parting = first_parting(reference.numbers, here.numbers, ALLOWED)
    return parting, locate(reference.traces[0], here.traces, ALLOWED)


def _traces(folder: Path) -> dict[int, list[TraceEntry]]:
    return {int(p.stem[-5:]): read_trace(p) for p in sorted(folder.glob("trace-*.jsonl"))}

"""Muon against AdamW: how many steps to the same loss, over seeds, with a p-value.

python examples/applications/language/optimizers.py             # the table of optimizers.json
python examples/applications/language/optimizers.py --measure   # all trainings: minutes

Each optimizer first has its learning rate chosen on a seed of its own, from the same rates. The
loss to be reached is AdamW's on that seed, after three quarters of the steps. Then every seed
trains once with each. No text is seen twice, so that the training loss is that of new text.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import combinations, product
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from train import train

FILE = Path(__file__).with_name("optimizers.json")
OPTIMIZERS = ("adamw", "muon")
RATES = (2e-3, 4e-3, 8e-3, 1.6e-2)
CHOSEN_ON, SEEDS = 0, (1, 2, 3, 4, 5)
STEPS, SMOOTHED = 100, 20
SMALL = ["--width", "96", "--layers", "3", "--context", "64", "global_batch_size=8"]
QUIET = [f"max_steps={STEPS}", "checkpoint.every_steps=null", "evaluation.max_samples=8"]


def losses_of(optimizer: str, rate: float, seed: int) -> list[float]:
    """Of every step of one training, in this process."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        level = ["lr_scheduler_type=constant", f"optimizer={optimizer}", f"learning_rate={rate}"]
        words = [f"optimization.{each}" for each in (*level, "decay_steps=null")]
        history = train([*SMALL, *QUIET, *words, f"seed={seed}", f"output_dir={folder}"])
    return [round(step.loss, 5) for step in history.steps]


def smoothed(losses: Sequence[float]) -> list[float]:
    """Means of the last steps, from the first step that has so many."""
    return [fmean(losses[k - SMOOTHED : k]) for k in range(SMOOTHED, len(losses) + 1)]


def steps_to(target: float, losses: Sequence[float]) -> int:
    """The first step at which it is reached; one more than there are if it never is."""
    reached = (k for k, mean in enumerate(smoothed(losses), SMOOTHED) if mean <= target)
    return next(reached, len(losses) + 1)


def p_value(a: Sequence[float], b: Sequence[float]) -> float:
    """How often chance alone would part the means so far: over every way to deal the samples."""
    both, found = [*a, *b], abs(fmean(a) - fmean(b))
    chosen = [set(each) for each in combinations(range(len(both)), len(a))]
    apart = [
        abs(fmean(both[k] for k in one) - fmean(both[k] for k in range(len(both)) if k not in one))
        for one in chosen
    ]
    return fmean(each >= found - 1e-9 for each in apart)


def measure() -> dict[str, Any]:
    """Two trainings at a time, one on each core."""
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:

        def trained(asked: Iterable[tuple[str, float, int]]) -> list[list[float]]:
            return list(pool.map(losses_of, *zip(*asked, strict=True)))

        tries = list(product(OPTIMIZERS, RATES))
        curves = trained((name, rate, CHOSEN_ON) for name, rate in tries)
        ends = {key: smoothed(curve)[-1] for key, curve in zip(tries, curves, strict=True)}
        best = {name: min(RATES, key=lambda r, n=name: ends[n, r]) for name in OPTIMIZERS}
        adamw = curves[tries.index(("adamw", best["adamw"]))]
        seeds = list(product(OPTIMIZERS, SEEDS))
        found = trained((name, best[name], seed) for name, seed in seeds)
    return {
        "target": round(fmean(adamw[STEPS * 3 // 4 - SMOOTHED : STEPS * 3 // 4]), 2),
        "rates": {name: {str(r): round(ends[name, r], 4) for r in RATES} for name in OPTIMIZERS},
        "learning_rate": best,
        "seeds": SEEDS,
        "losses": {
            name: [curve for (n, _), curve in zip(seeds, found, strict=True) if n == name]
            for name in OPTIMIZERS
        },
    }


def table(found: dict[str, Any]) -> str:
    target = found["target"]
    steps = {n: [steps_to(target, each) for each in found["losses"][n]] for n in OPTIMIZERS}
    lines = ["| optimizer | learning rate | steps, by seed | mean |", "| --- | ---: | --- | ---: |"]
    for name in OPTIMIZERS:
        rate, shown = found["learning_rate"][name], ", ".join(map(str, steps[name]))
        lines.append(f"| {name} | {rate:g} | {shown} | {fmean(steps[name]):.1f} |")
    ratio = fmean(steps["muon"]) / fmean(steps["adamw"])
    return "\n".join(
        [
            f"steps to a loss of {target}",
            "",
            *lines,
            "",
            f"muon / adamw: {ratio:.2f}, p = {p_value(steps['muon'], steps['adamw']):.4f}",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", action="store_true", help="train everything again")
    parser.add_argument("--file", type=Path, default=FILE)
    asked = parser.parse_args()
    if asked.measure:
        asked.file.write_text(json.dumps(measure()) + "\n")
    elif not asked.file.exists():
        parser.error(f"{asked.file} is not there: --measure makes it")
    print(table(json.loads(asked.file.read_text())))


if __name__ == "__main__":
    main()

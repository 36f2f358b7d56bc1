"""`benchmarks parameter-server`: what staleness costs, and when not waiting pays.

All arms train the same model on the same samples at the same learning rate, seed by seed in one
world: on equal ranks, with one slow rank, and with ranks that are slow in turns.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.parameter_server.worker import run_jobs
from benchmarks.report import machine
from drivetrain.core.requirements import require
from drivetrain.core.statistics import MedianInterval, bootstrap, paired_ratio
from drivetrain.testing import run_ranks

NUM_RANKS, SEEDS = 3, range(1, 11)
_STEPS, _STEP_S, _GIVE_UP_S = 60, 0.01, 3600.0
_LEARNING_RATE = {"learning_rate": 3e-3, "lr_scheduler_type": "constant"}
RANKS = ("equal", "one slow", "slow in turns")
Job = dict[str, Any]
Outcome = dict[str, Any]


def _served(mode: str, **details: Any) -> dict[str, Any]:
    return {"strategy": "parameter_server", "parameter_server": {"mode": mode, **details}}


DDP, ASYNCHRONOUS = "ddp", "asynchronous"
ARMS: dict[str, dict[str, Any]] = {
    DDP: {"strategy": "ddp"},
    "stale_synchronous, bound 4": _served("stale_synchronous", staleness_bound=4),
    ASYNCHRONOUS: _served(ASYNCHRONOUS),
    "local_sgd, 16 steps": {"strategy": "local_sgd", "local_sgd": {"inner_steps": 16}},
}
ON_EQUAL_RANKS: dict[str, dict[str, Any]] = {
    "ddp, again": {"strategy": "ddp"},
    "synchronous": _served("synchronous"),
    "asynchronous, again": _served(ASYNCHRONOUS),
    **{f"asynchronous, pull_every {n}": _served(ASYNCHRONOUS, pull_every=n) for n in (4, 16, 48)},
}
"""What two equal runs differ by, and more staleness than ranks alone make."""
EMBEDDING: dict[str, dict[str, Any]] = {
    f"{optimizer}, {'rows' if is_sparse else 'whole'}": {
        "parallel": _served("synchronous", sparse_rows=is_sparse),
        "optimization": {**_LEARNING_RATE, "optimizer": optimizer, "weight_decay": 0.0},
    }
    for optimizer in ("sgd", "adamw")
    for is_sparse in (False, True)
}


def run_parameter_server(output: Path, num_seeds: int) -> str:
    """All arms; the table."""
    require("matplotlib", extra="bench")
    output.mkdir(parents=True, exist_ok=True)
    results = output / "samples.jsonl"
    results.unlink(missing_ok=True)
    run_ranks(run_jobs, NUM_RANKS, _GIVE_UP_S, args=(_jobs(num_seeds), str(results)))
    (output / "machine.json").write_text(json.dumps(machine()) + "\n")
    return report(output)


def _jobs(num_seeds: int) -> list[Job]:
    """Seed by seed, so that a busy spell of the machine meets every arm."""
    jobs = [_embedding_job(arm, changes) for arm, changes in EMBEDDING.items()]
    for seed in list(SEEDS)[:num_seeds]:
        for ranks in RANKS:
            arms = ARMS | (ON_EQUAL_RANKS if ranks == "equal" else {})
            jobs += [_job(arm, ranks, seed, parallel) for arm, parallel in arms.items()]
    return jobs


def _job(arm: str, ranks: str, seed: int, parallel: dict[str, Any]) -> Job:
    return {
        "part": "staleness",
        "arm": arm,
        "ranks": ranks,
        "seed": seed,
        "steps": _STEPS,
        "step_s": _STEP_S,
        "batch": 24 * NUM_RANKS,
        "changes": {"parallel": parallel, "optimization": _LEARNING_RATE},
    }


def _embedding_job(arm: str, changes: dict[str, Any]) -> Job:
    return {
        "part": "embedding",
        "arm": arm,
        "ranks": "equal",
        "seed": SEEDS[0],
        "steps": 20,
        "step_s": 0.0,
        "batch": 64 * NUM_RANKS,
        "changes": changes,
    }


def report(output: Path) -> str:
    """Write table.md and plot.png next to samples.jsonl; the table."""
    outcomes = [json.loads(line) for line in (output / "samples.jsonl").read_text().splitlines()]
    on = json.loads((output / "machine.json").read_text())
    table = make_table(outcomes, on)
    (output / "table.md").write_text(table)
    _plot([o for o in outcomes if o["part"] == "staleness"], output / "plot.png")
    return table


def make_table(outcomes: list[Outcome], on: dict[str, Any]) -> str:
    """Medians over seeds with the interval of their bootstrap."""
    trained = [o for o in outcomes if o["part"] == "staleness"]
    seeds = len({o["seed"] for o in trained})
    said = ", ".join(f"{name} {value}" for name, value in on.items())
    lines = [
        f"{NUM_RANKS} ranks on one machine, gloo; {said}. Computing is emulated by waiting "
        f"{_STEP_S * 1e3:.0f} ms a step; a slow rank waits four times as long, always (one slow) "
        f"or in one step of ten (in turns). {_STEPS} steps of AdamW on a network of 34,000 weights "
        f"at the same learning rate, {seeds} seeds: medians, with the 95% interval of each. "
        "Staleness is in updates. Time is until the last rank is through; its ratio is to ddp "
        "with the same seed beside it.",
        "",
        "| ranks | arm | staleness, mean | max | held-out loss | time, s | time / ddp's |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for ranks in RANKS:
        by_arm = _by_arm([o for o in trained if o["ranks"] == ranks])
        lines += [f"| {ranks} | {a} | {_cells(s, by_arm[DDP])} |" for a, s in by_arm.items()]
    lines += ["", *_embedding_lines([o for o in outcomes if o["part"] == "embedding"])]
    return "\n".join(lines) + "\n"


def _cells(sample: list[Outcome], ddp: list[Outcome]) -> str:
    seconds = [max(o["seconds_by_rank"]) for o in sample]
    ratio = paired_ratio(seconds, [max(o["seconds_by_rank"]) for o in ddp])
    mean = most = "–"
    if sample[0]["staleness_mean"] is not None:
        mean = f"{median(o['staleness_mean'] for o in sample):.1f}"
        most = f"{max(o['staleness_max'] for o in sample):.0f}"
    loss = _shown(bootstrap([o["held_out_loss"] for o in sample]), 3)
    return f"{mean} | {most} | {loss} | {median(seconds):.2f} | {_shown(ratio, 2)}"


def _shown(found: MedianInterval, digits: int) -> str:
    return f"{found.value:.{digits}f} ({found.low:.{digits}f} to {found.high:.{digits}f})"


def _embedding_lines(outcomes: list[Outcome]) -> list[str]:
    lines = [
        "A table of 50,000 rows of 32 numbers (6.4 MB) and a small layer on it, synchronous: what "
        "a rank sends in a step, as worker and server. A step touches at most 1,536 rows.",
        "",
        "| optimizer, what is sent | MB per rank and step | last loss |",
        "| --- | ---: | ---: |",
    ]
    for arm, sample in _by_arm(outcomes).items():
        sent = median(o["sent_bytes_per_rank_and_step"] for o in sample) / 1e6
        lines.append(f"| {arm} | {sent:.2f} | {sample[0]['train_losses'][-1]:.6f} |")
    return lines


def _by_arm(outcomes: list[Outcome]) -> dict[str, list[Outcome]]:
    by_arm: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        by_arm.setdefault(outcome["arm"], []).append(outcome)
    return by_arm


def _plot(outcomes: list[Outcome], path: Path) -> None:
    """Left: loss against staleness. Right: time on unequal ranks."""
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 5), layout="constrained")
    equal = _by_arm([o for o in outcomes if o["ranks"] == "equal"])
    ddp = [o["held_out_loss"] for o in equal[DDP]]
    left.axhspan(min(ddp), max(ddp), color="0.88")
    left.axhline(median(ddp), color="0.5", label="ddp, and its range over seeds")
    local = [o["held_out_loss"] for o in equal["local_sgd, 16 steps"]]
    left.axhline(median(local), color="0.2", linestyle=":", label="local_sgd, 16 steps")
    for arm, sample in equal.items():
        if sample[0]["staleness_mean"] is not None and "again" not in arm:
            x = [o["staleness_mean"] for o in sample]
            y = [o["held_out_loss"] for o in sample]
            left.scatter(x, y, s=18, alpha=0.7, label=arm)
    left.set(xscale="symlog", yscale="log", xlabel="mean staleness, updates")
    left.set(ylabel="held-out loss", title=f"equal ranks, {_STEPS} steps, one dot per seed")
    left.legend(fontsize=8)
    shown = list(ARMS)
    for number, ranks in enumerate(RANKS):
        by_arm = _by_arm([o for o in outcomes if o["ranks"] == ranks])
        values = [median(max(o["seconds_by_rank"]) for o in by_arm[arm]) for arm in shown]
        places = [place + 0.26 * (number - 1) for place in range(len(shown))]
        right.barh(places, values, height=0.24, label=ranks)
    right.set_yticks(range(len(shown)), shown)
    right.invert_yaxis()
    right.set(xlabel=f"seconds for {_STEPS} steps, until the last rank is through")
    right.legend(title="ranks", fontsize=8)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)

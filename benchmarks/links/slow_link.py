"""`benchmarks slow-link`: time to the same held-out loss, by what travels between two hosts.

Two hosts with one rank each, on links of 100 Mbit/s, 1 Gbit/s and as fast as the machine has it.
ddp is tuned first on each link (bucket size, gradients in fp32 or bf16); every other arm is
measured against the fastest of those. Arms that train what ddp trains differ only in what a step
takes: they are timed in short turns, over and over. The others are timed to the same loss.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.links.on_hosts import Host, MakeHosts, run_ranks_on
from benchmarks.report import machine
from drivetrain.core.requirements import require

RATES_MBIT: dict[str, float | None] = {"100 Mbit/s": 100, "1 Gbit/s": 1000, "not limited": None}
TARGET, MAX_STEPS, SEEDS = 0.7, 480, (1, 2, 3)
TUNED = "ddp, tuned"
_BUCKETS_MB, _TUNING_STEPS, _TURN_STEPS, _TURNS = (1, 5, 25, 100), 6, 12, 5
_GIVE_UP_S = 1500.0
Job = dict[str, Any]
Outcome = dict[str, Any]


def _local(inner_steps: int, **details: Any) -> dict[str, Any]:
    return {
        "parallel": {
            "strategy": "local_sgd",
            "local_sgd": {"inner_steps": inner_steps, "outer_dtype": "bf16", **details},
        }
    }


def _compressed(name: str, **details: Any) -> dict[str, Any]:
    return {"communication": {"compression": name, **details}}


PLAIN: dict[str, dict[str, Any]] = {
    "ddp, torch's defaults": {},
    "fp16": _compressed("fp16"),
    "auto": _compressed("auto"),
}
"""They train what tuned ddp trains."""
ARMS: dict[str, dict[str, Any]] = {
    "powersgd, rank 4": _compressed("powersgd", powersgd={"rank": 4, "start_step": 2}),
    "topk, 1 %": _compressed("topk", topk={"ratio": 0.01}),
    "local SGD, 16 steps": _local(16),
    "local SGD, 32 steps": _local(32),
    "DiLoCo, 32 steps": _local(32, outer="diloco"),
}


def run_slow_link(output: Path, make_hosts: MakeHosts) -> str:
    """All arms on all links; the table."""
    require("matplotlib", extra="bench")
    output.mkdir(parents=True, exist_ok=True)
    by_rate: dict[str, Any] = {}
    for name, rate in RATES_MBIT.items():
        with make_hosts(2, rate) as hosts:
            tuning = _on(hosts, [_tuning_job(mb, dtype) for dtype, mb in _tunings()])
            best = min(tuning, key=lambda each: float(each["median_step_s"]))
            tuned = {TUNED: best["changes"]}
            # turn by turn and seed by seed, so that a busy spell of the machine meets every arm
            turns = [
                _turn(arm, changes, number)
                for number in range(_TURNS)
                for arm, changes in (tuned | PLAIN).items()
            ]
            jobs = [
                _job(arm, changes, seed)
                for seed in SEEDS
                for arm, changes in (tuned | ARMS).items()
            ]
            outcomes = _on(hosts, turns + jobs)
            by_rate[name] = {
                "tuning": tuning,
                "tuned": best["arm"],
                "turns": outcomes[: len(turns)],
                "runs": outcomes[len(turns) :],
            }
        raw = {"machine": machine(), "target": TARGET, "links": by_rate}
        (output / "samples.json").write_text(json.dumps(raw) + "\n")
    return report(output)


def _tunings() -> list[tuple[str, int]]:
    return [(dtype, mb) for dtype in ("none", "bf16") for mb in _BUCKETS_MB]


def _tuning_job(bucket_mb: int, compression: str) -> Job:
    changes = _compressed(compression) | {"parallel": {"ddp": {"bucket_cap_mb": bucket_mb}}}
    name = f"{'fp32' if compression == 'none' else compression}, {bucket_mb} MB"
    return {**_turn(name, changes, 0), "max_steps": _TUNING_STEPS}


def _turn(arm: str, changes: dict[str, Any], number: int) -> Job:
    return {**_job(arm, changes, number), "max_steps": _TURN_STEPS, "target": None}


def _job(arm: str, changes: dict[str, Any], seed: int) -> Job:
    return {"arm": arm, "changes": changes, "seed": seed, "max_steps": MAX_STEPS, "target": TARGET}


def _on(hosts: Sequence[Host], jobs: list[Job]) -> list[Outcome]:
    """Run the jobs one after the other in one world, one rank on each host."""
    with tempfile.TemporaryDirectory() as folder:
        listed, results = Path(folder) / "jobs.json", Path(folder) / "results.jsonl"
        listed.write_text(json.dumps(jobs))
        words = ["benchmarks.links.slow_link_worker", str(listed), str(results)]
        run_ranks_on(hosts, words, _GIVE_UP_S)
        outcomes = [json.loads(line) for line in results.read_text().splitlines()]
    return [{**o, "changes": job["changes"]} for o, job in zip(outcomes, jobs, strict=True)]


def report(output: Path) -> str:
    """Write table.md and plot.png next to samples.json; the table."""
    document = json.loads((output / "samples.json").read_text())
    table = make_table(document)
    (output / "table.md").write_text(table)
    _plot(document["links"], output / "plot.png")
    return table


def make_table(document: dict[str, Any]) -> str:
    """Medians over seeds, each against tuned ddp on the same link and with the same seed."""
    machine = ", ".join(f"{name} {value}" for name, value in document["machine"].items())
    lines = [
        f"Two hosts (network namespaces), one rank each, gloo; {machine}.",
        f"4.2 million weights, AdamW; training time to a held-out loss of {document['target']:g}, "
        f"looked at every 8 steps and without the time that takes. Medians over {len(SEEDS)} "
        "seeds, with the range; the ratios are medians of pairs with the same seed, with theirs. "
        "fp16, auto and torch's defaults train what tuned ddp trains: theirs are the median steps "
        f"of {_TURNS} turns of {_TURN_STEPS} steps, each against tuned ddp's turn beside it.",
        "",
        "| link | arm | mean step | steps | seconds to the loss | faster than tuned ddp |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for link, measured in document["links"].items():
        runs, turns = _by_arm(measured["runs"]), _by_arm(measured["turns"])
        for arm, outcomes in runs.items():
            shown = f"{arm} ({measured['tuned']})" if arm == TUNED else arm
            lines.append(f"| {link} | {shown} | {_cells(outcomes, runs[TUNED])} |")
        for arm, outcomes in turns.items():
            if arm != TUNED:
                lines.append(f"| {link} | {arm} | {_turn_cells(outcomes, turns[TUNED])} |")
    return "\n".join(lines) + "\n"


def _cells(outcomes: list[Outcome], baseline: list[Outcome]) -> str:
    step_ms = median(outcome["seconds"] / outcome["steps"] for outcome in outcomes) * 1e3
    steps = median(outcome["steps"] for outcome in outcomes)
    if not all(outcome["is_reached"] for outcome in outcomes):
        return f"{step_ms:.0f} ms | {steps:g} | not reached | –"
    seconds = [outcome["seconds"] for outcome in outcomes]
    spread = f"{median(seconds):.1f} ({min(seconds):.1f} to {max(seconds):.1f})"
    return f"{step_ms:.0f} ms | {steps:g} | {spread} | {_times(outcomes, baseline, 'seconds')}"


def _turn_cells(turns: list[Outcome], baseline: list[Outcome]) -> str:
    step_ms = median(turn["median_step_s"] for turn in turns) * 1e3
    return f"{step_ms:.0f} ms | as ddp | – | {_times(turns, baseline, 'median_step_s')}"


def _times(outcomes: list[Outcome], baseline: list[Outcome], what: str) -> str:
    """How many times faster: the median over pairs with the same seed, and their range."""
    taken_s = {outcome["seed"]: outcome[what] for outcome in baseline}
    ratios = [taken_s[outcome["seed"]] / outcome[what] for outcome in outcomes]
    return f"{median(ratios):.2f}× ({min(ratios):.2f} to {max(ratios):.2f})"


def _by_arm(runs: list[Outcome]) -> dict[str, list[Outcome]]:
    by_arm: dict[str, list[Outcome]] = {}
    for outcome in runs:
        by_arm.setdefault(outcome["arm"], []).append(outcome)
    return by_arm


def _plot(links: dict[str, Any], path: Path) -> None:
    """Held-out loss over training time, one panel per link."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(links), figsize=(5 * len(links), 3.8), squeeze=False)
    for axis, (link, measured) in zip(axes.flat, links.items(), strict=True):
        for arm, outcomes in _by_arm(measured["runs"]).items():
            curve = outcomes[0]["curve"]
            axis.plot([c[1] for c in curve], [c[2] for c in curve], marker=".", label=arm)
        axis.set_xscale("log")
        axis.axhline(TARGET, color="black", linewidth=0.8, linestyle=":")
        axis.set_title(link, fontsize=10)
        axis.set_xlabel("seconds of training")
        axis.set_ylabel("held-out loss")
    axes.flat[-1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)

"""`python -m benchmarks plan-time`: predicted step times next to measured ones.

At each place (so many hosts, so many ranks, such a link) the machine is probed first, then every
plan is predicted and the predictions are written down, and only then are the plans trained: in
turns, over and over, so that a busy spell of the machine meets all of them. A place that has been
measured is not measured again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.links.on_hosts import Host, MakeHosts, run_ranks_on

HELD_OUT = ("gpt", "hf_llama")
"""Nothing in the planner was chosen by looking at their step times.

`gpt_wide` and `llama_deep` stood here in a first round, which showed what the probe did not see.
"""
BATCH = 12
"""Samples a step: what 1, 2, 3 and 4 ranks divide."""
NUM_PLANS = 6
_GIVE_UP_S = 900.0


@dataclass(frozen=True)
class Place:
    """Where ranks run."""

    hosts: int
    ranks_per_host: int
    rate_mbit: float | None = None
    rounds: int = 2

    @property
    def name(self) -> str:
        """For tables and files."""
        ranks = self.hosts * self.ranks_per_host
        if self.hosts == 1:
            return f"{ranks} rank{'s' if ranks > 1 else ''}, one host"
        link = "not limited" if self.rate_mbit is None else f"{self.rate_mbit:g} Mbit/s"
        return f"{ranks} ranks, {self.hosts} hosts, {link}"

    @property
    def folder(self) -> str:
        """Of its files."""
        rate = "" if self.rate_mbit is None else f"-{self.rate_mbit:g}mbit"
        return f"{self.hosts}x{self.ranks_per_host}{rate}"


PLACES = (
    Place(1, 1),
    Place(1, 2),
    Place(2, 1, 1000),
    Place(2, 1, 100, rounds=1),
    Place(2, 1),
    Place(1, 4),
    Place(1, 3),
)


def run_plan_time(output: Path, make_hosts: MakeHosts) -> str:
    """Every place that has not been measured yet; the table."""
    from benchmarks.plan.time_report import report

    for place in PLACES:
        if not (output / place.folder / "measured.json").exists():
            measure_place(output / place.folder, place, HELD_OUT, make_hosts)
    return report(output)


def measure_place(folder: Path, place: Place, models: Sequence[str], make_hosts: MakeHosts) -> None:
    """Probe, predict, write the predictions down; then measure."""
    folder.mkdir(parents=True, exist_ok=True)
    with make_hosts(place.hosts, place.rate_mbit) as hosts:
        probed = probe(folder, place, hosts)
        predicted = {"seconds_to_probe": probed, "plans": predict(folder, models)}
        (folder / "predicted.json").write_text(json.dumps(predicted, indent=1) + "\n")
        words = ["benchmarks.plan.time_worker", str(folder), str(place.rounds)]
        run_ranks_on(hosts, words, _GIVE_UP_S, place.ranks_per_host)


def probe(folder: Path, place: Place, hosts: Sequence[Host]) -> float:
    """cluster.yaml of this place, as `drivetrain probe` writes it; the seconds it took."""
    from drivetrain.cluster.file import cluster_file, to_yaml

    began = time.perf_counter()
    raw = folder / "probe.json"
    words = ["drivetrain.plan.probe", str(raw), str(folder)]
    run_ranks_on(hosts, words, _GIVE_UP_S, place.ranks_per_host)
    (folder / "cluster.yaml").write_text(to_yaml(cluster_file(json.loads(raw.read_text()))))
    raw.unlink()  # cluster.yaml has it all
    return time.perf_counter() - began


def predict(folder: Path, models: Sequence[str]) -> list[dict[str, Any]]:
    """For each model the best plan and others down to the slowest, evenly."""
    from drivetrain.cluster.file import load_cluster
    from drivetrain.plan.plan import estimate_dict
    from drivetrain.plan.search import Question, search

    cluster = load_cluster(str(folder / "cluster.yaml"))
    question = Question(BATCH, precisions=("fp32",), strategies=("ddp", "fsdp"))
    found = []
    for model in models:
        ranked = search(_profiler(model), cluster, question).fitting
        last, number = len(ranked) - 1, min(NUM_PLANS, len(ranked))
        for position in sorted({round(k * last / max(1, number - 1)) for k in range(number)}):
            priced = ranked[position]
            found.append({"model": model, "position": position, **estimate_dict(priced)})
    return found


@cache
def _profiler(model: str) -> Any:
    """The same at every place."""
    from benchmarks.plan.models import subject_of
    from drivetrain.plan.profile.profiling import Profiler

    return Profiler(subject_of(model, "adamw"))

"""Plan: the answer, with its prediction, its reasons and its error bar; also as plan.json."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from drivetrain.cluster.description import Cluster
from drivetrain.core.files import write_whole
from drivetrain.plan.cost.estimate import Estimate
from drivetrain.plan.cost.timing import assumptions
from drivetrain.plan.profile.profiling import Profiler
from drivetrain.plan.reasons import kind_of, what_would_change_it, why_best, why_not
from drivetrain.plan.search import Question, search

# What was seen when predictions were held against measurements; docs/planning.md
MEMORY_ERROR = "92 configurations on a CPU: median 0.0%, 95th percentile 5.6%; no GPU was measured"


@dataclass(frozen=True)
class Plan:
    """What to do, ranked."""

    model: str
    num_parameters: int
    cluster: str
    num_devices: int
    question: Question
    ranked: tuple[Estimate, ...]
    why: str
    why_not: Mapping[str, str]
    changes: tuple[str, ...]
    nearest_misses: tuple[Estimate, ...]
    num_considered: int
    seconds_to_profile: float
    """To trace the model in every way that was looked at."""
    seconds_to_search: float
    """All the rest: pricing, ranking, reasons."""

    @property
    def best(self) -> Estimate | None:
        """None when nothing fits."""
        return self.ranked[0] if self.ranked else None

    def to_dict(self) -> dict[str, Any]:
        """For machines."""
        return {
            "model": self.model,
            "num_parameters": self.num_parameters,
            "cluster": self.cluster,
            "num_devices": self.num_devices,
            "question": asdict(self.question),
            "plans": [estimate_dict(one) for one in self.ranked[:20]],
            "why": self.why,
            "why_not": dict(self.why_not),
            "would_change_it": list(self.changes),
            "nearest_misses": [estimate_dict(one) for one in self.nearest_misses[:3]],
            "num_considered": self.num_considered,
            "seconds_to_profile": self.seconds_to_profile,
            "seconds_to_search": self.seconds_to_search,
            "assumptions": list(assumptions()),
            "memory_error": MEMORY_ERROR,
        }

    def write(self, path: Path) -> None:
        """plan.json."""
        write_whole(path, json.dumps(self.to_dict(), indent=2) + "\n")


def make_plan(profiler: Profiler, cluster: Cluster, question: Question) -> Plan:
    """Search, rank, and say why."""
    began, profiled = time.perf_counter(), profiler.seconds
    answer = search(profiler, cluster, question)
    best = answer.fitting[0] if answer.fitting else None
    others = [one for one in answer.fitting if best is None or kind_of(one) != kind_of(best)]
    changes = what_would_change_it(profiler, cluster, answer, question.objective)
    some = next(iter(answer.fitting or answer.too_large))
    profiled = profiler.seconds - profiled
    return Plan(
        model=profiler.subject.name,
        num_parameters=profiler.num_parameters,
        cluster=cluster.name,
        num_devices=some.candidate.layout.world_size,
        question=question,
        ranked=answer.fitting,
        why=why_best(best, others[0] if others else None) if best else "nothing fits",
        why_not=why_not(answer),
        changes=tuple(dict.fromkeys(changes)),
        nearest_misses=answer.too_large,
        num_considered=answer.num_considered,
        seconds_to_profile=profiled,
        seconds_to_search=time.perf_counter() - began - profiled,
    )


def estimate_dict(one: Estimate) -> dict[str, Any]:
    """One candidate with its prediction."""
    candidate = one.candidate
    return {
        "title": candidate.title,
        "settings": candidate.settings(),
        "layout": dict(
            zip(("pp", "dp_replicate", "dp_shard", "cp", "tp"), candidate.layout.sizes, strict=True)
        ),
        "micro_batch_size": candidate.micro_batch_size,
        "accumulation": candidate.accumulation,
        "memory_bytes": {**one.memory.components(), "total": one.memory.total},
        "memory_moment": one.memory.moment,
        "memory_limit_bytes": one.memory_limit_bytes,
        "step_s": {**one.time.components(), "total": one.time.total},
        "hidden_exchange_s": one.time.hidden,
        "samples_per_s": one.samples_per_s,
        "tokens_per_s": one.tokens_per_s,
        "utilization": one.utilization,
        "checkpoint_bytes": one.checkpoint_bytes,
        "checkpoint_s": one.checkpoint_s,
        "price_per_step": one.price_per_step,
    }

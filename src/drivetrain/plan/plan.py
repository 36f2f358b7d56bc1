"""Plan: the ranked candidates with predictions, reasons and error bar; also as plan.json."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from drivetrain.cluster.description import Cluster, Link
from drivetrain.core.files import write_whole
from drivetrain.core.text import readable_bytes
from drivetrain.plan.cost.estimate import Estimate, estimate, memory_limit
from drivetrain.plan.cost.timing import assumptions
from drivetrain.plan.profile.profiling import Profiler
from drivetrain.plan.search import Answer, Objective, Question, search

# Why a plan is better than the next, why others were not chosen, and what would change that.

_MANY = 40


def why_best(fitting: Sequence[Estimate]) -> str:
    """Return one sentence: the next best plan of another kind, and the cause of the difference."""
    if not fitting:
        return "nothing fits"
    best, kind = fitting[0], kind_of(fitting[0])
    runner_up = next((one for one in fitting if kind_of(one) != kind), None)
    if runner_up is None:
        many = f"all {len(fitting):,} plans that fit are of one kind ({kind}); this is the best"
        return many if len(fitting) > 1 else "no other plan fits"
    mine, theirs = best.time.components(), runner_up.time.components()
    gaps = {name: theirs.get(name, 0.0) - mine.get(name, 0.0) for name in {*mine, *theirs}}
    name, gap = max(gaps.items(), key=lambda item: item[1])
    other = runner_up.candidate
    what = f"{other.title}, micro-batch {other.micro_batch_size}, recompute {other.recompute}"
    per_sample = runner_up.time.total / other.global_batch_size
    own = best.time.total / best.candidate.global_batch_size
    slower = per_sample / own - 1.0
    if slower < 0.005:
        return f"as fast as the next ({what}) and simpler"
    cause = f", most of it {name} ({_seconds(gap)} more)" if gap > 0 else ""
    return f"the next ({what}) takes {slower:.0%} longer{cause}"


def why_not(answer: Answer) -> dict[str, str]:
    """Return, per kind of layout that is not the best, why it is not, in a few words."""
    best = answer.fitting[0] if answer.fitting else None
    reasons: dict[str, str] = {}
    for priced in answer.fitting:
        kind = kind_of(priced)
        if best is not None and kind != kind_of(best) and kind not in reasons:
            slower = priced.time.total / best.time.total - 1.0
            longer = f"fits, but takes {slower:.0%} longer per step"
            reasons[kind] = longer if slower >= 0.005 else "fits, and takes as long per step"
    for priced in answer.too_large:
        kind = kind_of(priced)
        known = kind in reasons or (best is not None and kind == kind_of(best))
        if not known:
            reasons[kind] = (
                f"needs at least {readable_bytes(priced.memory.total)} per rank, and "
                f"{readable_bytes(priced.memory_limit_bytes)} is available"
            )
    return reasons


def kind_of(priced: Estimate) -> str:
    """Return how the model is distributed, without sizes."""
    candidate = priced.candidate
    layout = candidate.layout
    words = []
    if layout.dp * layout.cp > 1 or layout.world_size == 1:
        words.append(candidate.cost.label(candidate.use))
    words += [axis for axis in ("ep", "tp", "pp", "cp") if getattr(layout, axis) > 1]
    return " + ".join(words) + (" + offload" if candidate.offload != "none" else "")


def what_would_change_it(
    profiler: Profiler, cluster: Cluster, answer: Answer, objective: Objective
) -> list[str]:
    """Return, for a few properties of the cluster, which change would make another kind win."""
    if not answer.fitting:
        return []
    pool = [*_varied(answer.fitting), *_varied(answer.too_large)]
    best = kind_of(answer.fitting[0])
    said = []
    for what, factors, change in _CHANGES:
        for factor in factors:
            changed = change(cluster, factor)
            priced = [estimate(profiler, one.candidate, changed) for one in pool]
            fitting = [one for one in priced if one.memory.total <= memory_limit(changed)]
            if not fitting:
                continue
            winner = min(fitting, key=lambda one: one.time.total / one.candidate.global_batch_size)
            if kind_of(winner) != best:
                said.append(f"{what} {factor:g} times as {_side(what)}: {winner.candidate.title}")
                break
    if objective == "fewest":
        return []
    return said


def _varied(priced: Sequence[Estimate]) -> list[Estimate]:
    """Return the best few of every kind."""
    per_kind: dict[str, list[Estimate]] = {}
    for one in priced:
        kept = per_kind.setdefault(kind_of(one), [])
        if len(kept) < 3:
            kept.append(one)
    return [one for kept in per_kind.values() for one in kept][:_MANY]


def _side(what: str) -> str:
    return "large" if "memory" in what else "fast"


def _memory(cluster: Cluster, factor: float) -> Cluster:
    memory = cluster.device_memory_bytes
    return cluster if memory is None else replace(cluster, device_memory_bytes=int(memory * factor))


def _between(cluster: Cluster, factor: float) -> Cluster:
    link = cluster.between
    if link is None:
        return cluster
    return replace(cluster, between=Link(link.bytes_per_s * factor, link.latency_s / factor))


def _inside(cluster: Cluster, factor: float) -> Cluster:
    link = cluster.inside
    if link is None:
        return cluster
    return replace(cluster, inside=Link(link.bytes_per_s * factor, link.latency_s / factor))


_CHANGES: Sequence[tuple[str, tuple[float, ...], Callable[[Cluster, float], Cluster]]] = (
    ("device memory", (1.5, 2.0, 4.0), _memory),
    ("device memory", (0.75, 0.5, 0.25), _memory),
    ("links between nodes", (2.0, 4.0, 10.0), _between),
    ("links between nodes", (0.5, 0.25, 0.1), _between),
    ("links inside a node", (0.5, 0.25, 0.1), _inside),
)


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 0.1 else f"{value * 1000:.1f} ms"


# Result of `make plan-memory`; see docs/how-planning-works.md
MEMORY_ERROR = "131 configurations on a CPU: median 0.0%, 95th percentile 3.1%; no GPU was measured"


@dataclass(frozen=True)
class Plan:
    """The ranked answer to a question."""

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
    """Time to trace the model in every way that was considered."""
    seconds_to_search: float
    """Time for everything else: estimates, ranking, reasons."""
    notes: tuple[str, ...] = ()
    """What the best plan changes besides memory and speed."""

    @property
    def best(self) -> Estimate | None:
        """None when nothing fits."""
        return self.ranked[0] if self.ranked else None

    def to_dict(self) -> dict[str, Any]:
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
            "notes": list(self.notes),
            "nearest_misses": [estimate_dict(one) for one in self.nearest_misses[:3]],
            "num_considered": self.num_considered,
            "seconds_to_profile": self.seconds_to_profile,
            "seconds_to_search": self.seconds_to_search,
            "assumptions": list(assumptions()),
            "memory_error": MEMORY_ERROR,
        }

    def write(self, path: Path) -> None:
        write_whole(path, json.dumps(self.to_dict(), indent=2) + "\n")


def make_plan(profiler: Profiler, cluster: Cluster, question: Question) -> Plan:
    """Search, rank, and give reasons."""
    began, profiled = time.perf_counter(), profiler.seconds
    answer = search(profiler, cluster, question)
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
        why=why_best(answer.fitting),
        why_not=why_not(answer),
        changes=tuple(dict.fromkeys(changes)),
        nearest_misses=answer.too_large,
        num_considered=answer.num_considered,
        seconds_to_profile=profiled,
        seconds_to_search=time.perf_counter() - began - profiled,
        notes=_on_micro_batch(profiler, answer, question),
    )


def _on_micro_batch(profiler: Profiler, answer: Answer, question: Question) -> tuple[str, ...]:
    """Say that the best plan has another micro-batch size than the config, and what it changes."""
    said = question.configs_micro_batch_size
    planned = answer.fitting[0].candidate.micro_batch_size if answer.fitting else said
    if said in ("auto", planned):
        return ()
    note = f"micro_batch_size={planned} instead of the config's {said}"
    if profiler.per_micro_batch:
        note += f": {' and '.join(profiler.per_micro_batch)} depend on it, so the numbers change"
    return (note,)


def estimate_dict(one: Estimate) -> dict[str, Any]:
    """Return one candidate with its prediction, for plan.json."""
    candidate = one.candidate
    return {
        "title": candidate.title,
        "settings": candidate.settings(),
        "layout": asdict(candidate.layout),
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

"""Why a plan beats the next, why simpler ones were left, and what would have to change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from drivetrain.cluster.description import Cluster, Link
from drivetrain.core.text import readable_bytes
from drivetrain.plan.cost.estimate import Estimate, estimate, memory_limit
from drivetrain.plan.profile.profiling import Profiler
from drivetrain.plan.search import Answer, Objective

_MANY = 40


def why_best(best: Estimate, runner_up: Estimate | None) -> str:
    """One sentence: the next best, and where the difference comes from."""
    if runner_up is None:
        return "nothing else that was considered fits"
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
    """Per kind of spreading that is not the best: why it is not, in a few words."""
    best = answer.fitting[0] if answer.fitting else None
    reasons: dict[str, str] = {}
    for priced in answer.fitting:
        kind = kind_of(priced)
        if best is not None and kind != kind_of(best) and kind not in reasons:
            slower = priced.time.total / best.time.total - 1.0
            reasons[kind] = f"fits, but takes {slower:.0%} longer a step"
    for priced in answer.too_large:
        kind = kind_of(priced)
        known = kind in reasons or (best is not None and kind == kind_of(best))
        if not known:
            reasons[kind] = (
                f"needs {readable_bytes(priced.memory.total)} a rank at the least, and "
                f"{readable_bytes(priced.memory_limit_bytes)} can be had"
            )
    return reasons


def kind_of(priced: Estimate) -> str:
    """How the model is spread, sizes left out."""
    candidate = priced.candidate
    layout = candidate.layout
    words = []
    if layout.dp * layout.cp > 1 or layout.world_size == 1:
        words.append(candidate.cost.label(candidate.use))
    words += [axis for axis in ("tp", "pp", "cp") if getattr(layout, axis) > 1]
    return " + ".join(words) + (" + offload" if candidate.offload != "none" else "")


def what_would_change_it(
    profiler: Profiler, cluster: Cluster, answer: Answer, objective: Objective
) -> list[str]:
    """For a few properties of the cluster: at what change another kind of plan would win."""
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
    """The best few of every kind."""
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

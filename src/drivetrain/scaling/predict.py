"""Predict the step time of a size from one rank's step time and measured exchanges."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from drivetrain.cluster.description import Cluster, Device, Link
from drivetrain.cluster.exchange import ExchangeFit
from drivetrain.collectives.measure import measure_all
from drivetrain.collectives.request import CollectivesRequest, rank_sets
from drivetrain.core.traits import traits_of
from drivetrain.parallel.accelerator import Accelerator
from drivetrain.parallel.layout import Layout
from drivetrain.plan.candidate import Candidate
from drivetrain.plan.cost.estimate import estimate
from drivetrain.plan.probe import measure_overheads
from drivetrain.plan.profile.profiling import Profiler
from drivetrain.plan.profile.subject import Subject, token_batch
from drivetrain.scaling.request import Setting
from drivetrain.scaling.workload import VOCABULARY, Workload, loss_of

_EXCHANGES = ("all_reduce", "all_gather", "reduce_scatter")
_SMALL_BYTES = 4096
_OVERLAP = 0.9
"""The default of a cluster file; 0 if ranks compute on the CPU that also communicates."""


def profiler_of(workload: Workload) -> Profiler:
    """Return a profiler of the trained model, traced on fake tensors without emulated compute."""
    return Profiler(
        Subject(
            "scaling",
            lambda: workload.model(waits=False),
            loss_of,
            token_batch(VOCABULARY, workload.asked.sequence_length),
            lambda model: workload.optimizer(model.parameters()),
        )
    )


@dataclass(frozen=True)
class Exchanges:
    """The cost of communication, as measured by `bench collectives` and `probe`."""

    link: Link
    sharded_unit_s: float = 0.0
    """Host time of fsdp per layer in addition to communication; measured on CPUs only."""


def measure_exchanges(num_ranks: int, gradient_bytes: int, accelerator: Accelerator) -> Exchanges:
    """Measure exchanges on these ranks, at a small size and at this model's sizes."""
    sizes = (_SMALL_BYTES, max(2 * _SMALL_BYTES, gradient_bytes // 4), gradient_bytes)
    asked = CollectivesRequest(_EXCHANGES, sizes, is_thorough=False)
    (found,) = measure_all(asked, rank_sets([0] * num_ranks, {}), accelerator.device)
    if not accelerator.is_cpu:
        return Exchanges(link_of(found.fits()))
    overheads = measure_overheads({"inside": {"seconds": found.seconds()}})
    return Exchanges(link_of(found.fits()), overheads["fsdp"])


def link_of(fits: Sequence[ExchangeFit]) -> Link:
    by_kind = {each.kind: (each.bytes_per_s, each.latency_s) for each in fits}
    return Link(*by_kind["all_reduce"], by_kind)


def compute_seconds(setting: Setting, alone_s: float, waited_s: float) -> float:
    """Return one rank's compute time, from a step of bare torch on one rank.

    `waited_s`, the emulated part, scales with the share of samples. With emulation the rest stays
    constant, because it is small; without it, everything scales with the share.
    """
    rest = alone_s - waited_s
    return waited_s * setting.share + (rest if waited_s else rest * setting.share)


def predicted_s(
    profiler: Profiler,
    strategy: str,
    setting: Setting,
    compute_s: float,
    exchanges: Exchanges,
    overlap: float,
) -> float:
    """Predict a step of a strategy, on devices that compute as fast as the one rank did."""
    layout = Layout(**{traits_of(strategy).fills: setting.num_ranks})
    candidate = Candidate(layout, strategy, micro_batch_size=setting.rank_batch)
    unit_s = exchanges.sharded_unit_s
    device = Device("measured", 0, {"fp32": 1.0}, math.inf, overlap=overlap, sharded_unit_s=unit_s)
    cluster = Cluster(1, setting.num_ranks, None, device, exchanges.link)
    operations = estimate(profiler, candidate, cluster).time.compute
    as_fast = replace(device, flops={"fp32": operations / compute_s})
    return estimate(profiler, candidate, replace(cluster, device=as_fast)).time.total


def predictions(
    workload: Workload, alone_s: Mapping[str, float], found: Exchanges | None, *, is_cpu: bool
) -> dict[str, float]:
    """Predict step times by strategy; empty for one rank, where they were measured."""
    setting = workload.setting
    if found is None:
        return {}
    waited_s = (workload.asked.emulate_compute_ms or 0.0) / 1e3
    profiler, overlap = profiler_of(workload), 0.0 if is_cpu and not waited_s else _OVERLAP
    return {
        each: predicted_s(
            profiler, each, setting, compute_seconds(setting, seconds, waited_s), found, overlap
        )
        for each, seconds in alone_s.items()
    }

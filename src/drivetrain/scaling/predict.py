"""The planner's step time for a size, by what was measured on one rank and of the exchanges."""

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
"""As a cluster file has it; 0 where a rank computes on the processor that also exchanges."""


def profiler_of(workload: Workload) -> Profiler:
    """The model that is trained, traced on fake tensors; it never waits."""
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
    """What ranks take to exchange, as `bench collectives` and `probe` measure it."""

    link: Link
    sharded_unit_s: float = 0.0
    """What fsdp costs the host per layer beside what it sends; measured on CPUs only."""


def measure_exchanges(num_ranks: int, gradient_bytes: int, accelerator: Accelerator) -> Exchanges:
    """On these ranks, at an empty size and at this model's."""
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
    """Of one rank, by a step of bare torch on one rank of which so much was waiting.

    What is waited for is divided as the samples are; what is not stays where it is small beside
    the waiting, and is divided where it is all there is.
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
    """One step of a strategy, on devices that compute as fast as the one rank did."""
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
    """By strategy; on one rank nothing is exchanged, and that is where it was measured."""
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

"""The planner's prediction of what a rehearsal counts: memory and bytes of every stage.

These are two ways to compute the same figures. The planner traces one block of each kind and adds
up; a rehearsal runs the whole step as the rank itself. If they differ, one of them is wrong, or
there is something (padding of shards, a short last slice) that only the rehearsal sees.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

from drivetrain.core.bounded import one_line
from drivetrain.core.errors import DrivetrainError
from drivetrain.core.processes import end_with_parent
from drivetrain.data.batches import solve_micro_batch
from drivetrain.parallel.layout import AXES, Layout
from drivetrain.rehearse.calls import RehearsedCall
from drivetrain.rehearse.findings import RankReport
from drivetrain.rehearse.world import axes_of

SMALL = 1 << 10
"""Collectives of fewer bytes are counts, losses and norms, which the planner leaves out."""
PEAK = "peak memory"


@dataclass(frozen=True)
class Prediction:
    """What the planner predicts for each pipeline stage."""

    peak_bytes: tuple[float, ...]
    exchanged: tuple[dict[tuple[str, str], float], ...]
    """Bytes by (collective, axes), per stage."""


@dataclass(frozen=True)
class PlanComparison:
    """One figure, as predicted and as counted."""

    rank: int
    kind: str
    what: str
    predicted: float
    counted: float

    @property
    def error(self) -> float | None:
        """The relative error; None if nothing was counted."""
        return self.predicted / self.counted - 1.0 if self.counted else None


def predict_in_process(argv: tuple[str, ...], layout: Layout, connection: Connection) -> None:
    """A process's main function: run the script up to `Trainer.fit`, then the planner."""
    end_with_parent()
    try:
        connection.send(predict(argv, layout))
    except DrivetrainError as error:  # a rehearsal continues without it
        connection.send(one_line(error))
    except Exception as error:
        connection.send(f"{type(error).__name__}: {one_line(error)}")
    connection.close()


def predict(argv: Sequence[str], layout: Layout) -> Prediction:
    """Return the planner's prediction for the script's own settings."""
    from drivetrain.plan.cost.estimate import stage_memory
    from drivetrain.plan.cost.parts import exchanged_bytes
    from drivetrain.plan.of_config import candidate_of
    from drivetrain.plan.profile.profiling import Profiler
    from drivetrain.plan.profile.sources import from_script

    if argv[0] == "-m":
        raise NotImplementedError("the planner does not support modules started with -m")
    found = from_script(argv[0], argv[1:])
    if found.resolved is None:
        raise AssertionError("a script has a config")
    candidate = candidate_of(solve_micro_batch(found.resolved, layout.dp).config, layout)
    profile = Profiler(found.subject).profile(candidate.way)
    stages = range(layout.pp)
    return Prediction(
        tuple(stage_memory(profile, candidate, stage).total for stage in stages),
        tuple(exchanged_bytes(profile, candidate, stage) for stage in stages),
    )


def compare(
    prediction: Prediction, reports: Sequence[RankReport], layout: Layout
) -> list[PlanComparison]:
    """Compare the first rehearsed rank of every stage; ranks at the edges have short shards."""
    compared = []
    for stage in range(layout.pp):
        report = next(
            (r for r in reports if layout.coordinates(r.rank).pp == stage and not r.failure), None
        )
        if report is None:
            continue
        peak = prediction.peak_bytes[stage]
        figures = {PEAK: (peak, float(report.memory.peak))}
        counted = _counted(report.in_step, layout)
        predicted: dict[tuple[str, str], float] = defaultdict(float)
        for (name, axes), num_bytes in prediction.exchanged[stage].items():
            predicted[name, _one_name(axes, layout)] += num_bytes
        large = {key for key, num_bytes in predicted.items() if num_bytes >= SMALL}
        for key in sorted({*counted, *large}):
            figures[" ".join(key)] = (predicted.get(key, 0.0), counted.get(key, 0.0))
        compared += [
            PlanComparison(report.rank, report.kind, what, *both) for what, both in figures.items()
        ]
    return compared


def _axes(ranks: tuple[int, ...], layout: Layout) -> str:
    """Return a group's axes by name, also for all ranks, as the planner does."""
    axes = axes_of(ranks, layout)
    if axes != "all ranks":
        return _one_name(axes, layout)
    return " × ".join(axis for axis in AXES if getattr(layout, axis) > 1)


def _one_name(axes: str, layout: Layout) -> str:
    """Return `dp_shard` for `ep` if experts are on the same ranks as shards."""
    return "dp_shard" if axes == "ep" and layout.ep == layout.dp_shard else axes


def _counted(calls: Sequence[RehearsedCall], layout: Layout) -> dict[tuple[str, str], float]:
    summed: dict[tuple[str, str], float] = {}
    for call in calls:
        if call.num_bytes >= SMALL and call.name != "broadcast":  # shapes, sent once per step
            key = (call.name, _axes(call.ranks, layout))
            summed[key] = summed.get(key, 0.0) + call.num_bytes
    return summed

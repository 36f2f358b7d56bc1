"""Where two runs diverge: first by their losses, then, from traces, by step and place. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from drivetrain.verify.parity.fingerprint import Fingerprint, deviation, together
from drivetrain.verify.parity.trace import NO_MICRO_BATCH, Key, TraceEntry, TraceStage

# How far two layouts may differ by rounding alone, by number format.


@dataclass(frozen=True)
class Tolerance:
    """Relative tolerances."""

    loss: float
    gradient_norm: float
    output: float
    """Of one module's output, relative to its norm."""
    value: float
    """Of one parameter's gradient or update, or of a micro-batch's loss."""
    reason: str
    judges_traces: bool = True
    """Whether a module that differs is a failure even if losses and norms agree."""

    def of(self, stage: TraceStage) -> float:
        """The tolerance for a stage's values."""
        if stage is TraceStage.FORWARD:
            return self.output
        return self.value if stage in _COMPUTED else EXACT


EXACT = 1e-9
"""Initial weights, data and settings are computed alike everywhere: they must be equal."""
_COMPUTED = frozenset(
    {TraceStage.LOSS, TraceStage.BACKWARD, TraceStage.CLIPPING, TraceStage.UPDATE}
)

_ROUNDS = "fsdp rounds weights before it gathers them"
# In fp32, traces of healthy layouts differ by 2e-6. But an attention's key bias, whose gradient is
# only rounding error, drifts under Adam, and that module's output with it (1e-4 after ten steps).
TOLERANCES: Mapping[str, Tolerance] = {
    "fp32": Tolerance(1e-4, 1e-3, 1e-3, 1e-3, "sums are added in another order"),
    "bf16": Tolerance(2e-2, 1e-1, 1e-1, 1e-1, f"bf16 keeps 8 bits, and {_ROUNDS}", False),
    "float8": Tolerance(5e-2, 2e-1, 2e-1, 2e-1, "float8 keeps 4 bits: a last bit moves one", False),
    "fp16": Tolerance(5e-3, 5e-2, 5e-2, 5e-2, f"fp16 keeps 11 bits, and {_ROUNDS}", False),
}


_FAINT = 1e-2
"""A gradient or weight this much smaller than usual in its model is compared relative to the usual
size: where the true value is zero, as for an attention's key bias, only rounding is left."""
_FLOORED = frozenset({TraceStage.BACKWARD, TraceStage.CLIPPING, TraceStage.UPDATE})


class StepNumbers(NamedTuple):
    """What every run reports for a step."""

    loss: float
    gradient_norm: float | None


Numbers = Mapping[int, StepNumbers]
"""By step, counted from 1."""
ByRank = Mapping[int, Fingerprint]


@dataclass(frozen=True)
class Parting:
    """The first step whose loss or gradient norm differs from the reference's."""

    step: int
    what: str
    reference: float
    here: float


@dataclass(frozen=True)
class Divergence:
    """The first place where two traces differ."""

    step: int
    """0: before the first step."""
    stage: TraceStage
    place: str
    micro: int | None
    ranks: tuple[int, ...]
    """Those that differ from the reference there."""
    reference: float
    here: float
    """Norms, or plain values; equal norms can hide a shift or swap, which `deviation` shows."""
    deviation: float
    num_parting: int
    """Number of places of this stage and step that differ."""
    num_places: int
    ratio: float | None
    """Set if everything that differs is the same multiple of the reference."""

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "stage": str(self.stage)}

    def __str__(self) -> str:
        where = _WORDS[self.stage].format(place=self.place)
        of = "" if self.micro is None else f", micro-batch {self.micro}"
        when = f"step {self.step}" if self.step else "before the first step"
        return f"{when}, {self.stage}: {where}{of}, {self._values()}{self._others()}"

    def _values(self) -> str:
        if not self.ranks:
            return f"{self.reference:.6g} in the reference, missing on every rank"
        many = "s" if len(self.ranks) > 1 else ""
        return f"on rank{many} {', '.join(map(str, self.ranks))}: {self._compared()}"

    def _compared(self) -> str:
        if f"{self.here:.6g}" == f"{self.reference:.6g}":
            return (
                f"norm {self.here:.6g} as in the reference, but different elements "
                f"(by {self.deviation:.1e})"
            )
        return f"{self.here:.6g} instead of {self.reference:.6g}"

    def _others(self) -> str:
        if self.num_parting < 2:
            return ""
        every = self.num_parting == self.num_places
        text = "; also all" if every else f"; also {self.num_parting - 1} of"
        text += f" {self.num_places - 1} others of this stage"
        return text if self.ratio is None else f"{text}, by the same factor {self.ratio:.4g}"


_BY_ENGINE = (
    TraceStage.MEMBERS,
    TraceStage.BACKWARD,
    TraceStage.CLIPPING,
    TraceStage.UPDATE,
)
"""Stages that an engine that handles the gradients itself does in its own way."""
_WORDS = {
    TraceStage.UNSEEN: "{place}",
    TraceStage.START: "{place}",
    TraceStage.MEMBERS: "whether it holds {place}",
    TraceStage.DATA: "{place}",
    TraceStage.FORWARD: "output of {place}",
    TraceStage.LOSS: "{place}",
    TraceStage.BACKWARD: "gradient of {place}",
    TraceStage.CLIPPING: "{place}",
    TraceStage.SETTINGS: "{place}",
    TraceStage.UPDATE: "update of {place}",
}


def relative(here: float, reference: float) -> float:
    """Relative deviation of two numbers; infinite if only one of them is finite."""
    if here == reference or (math.isnan(here) and math.isnan(reference)):
        return 0.0
    apart = abs(here - reference) / max(abs(reference), 1e-12)
    return apart if math.isfinite(apart) else math.inf


def largest_deviations(reference: Numbers, here: Numbers) -> tuple[float, float]:
    """Largest relative deviation of any loss, and of any gradient norm."""
    losses, norms = [0.0], [0.0]
    for step, numbers in reference.items():
        if step in here:
            losses.append(relative(here[step].loss, numbers.loss))
            norms.append(_norm_deviation(numbers, here[step]))
    return max(losses), max(norms)


def first_parting(reference: Numbers, here: Numbers, allowed: Tolerance) -> Parting | None:
    """The first step that differs beyond the tolerance; a missing step counts as different."""
    for step, numbers in sorted(reference.items()):
        if step not in here:
            return Parting(step, "loss", numbers.loss, math.nan)
        if relative(here[step].loss, numbers.loss) > allowed.loss:
            return Parting(step, "loss", numbers.loss, here[step].loss)
        if _norm_deviation(numbers, here[step]) > allowed.gradient_norm:
            norms = (numbers.gradient_norm or math.nan, here[step].gradient_norm or math.nan)
            return Parting(step, "gradient norm", *norms)
    return None


_GROWN = 1e-2
"""A place that differs by more did not grow from rounding: something else was computed there."""


def agreed_before(
    parting: Parting, divergence: Divergence | None, reference: Numbers, here: Numbers
) -> float | None:
    """How far losses agreed before they part; None if a place shows that it is not rounding."""
    if divergence is not None and not divergence.deviation < _GROWN:
        return None
    before = {step: each for step, each in reference.items() if step < parting.step}
    return largest_deviations(before, here)[0]


def _norm_deviation(reference: StepNumbers, here: StepNumbers) -> float:
    if reference.gradient_norm is None or here.gradient_norm is None:
        return 0.0
    return relative(here.gradient_norm, reference.gradient_norm)


def locate(
    reference: Sequence[TraceEntry], ranks: Mapping[int, Sequence[TraceEntry]], allowed: Tolerance
) -> Divergence | None:
    """The first place, in the reference's order of execution, where another layout differs."""
    seen: dict[Key, dict[int, Fingerprint]] = defaultdict(dict)
    for rank, entries in ranks.items():
        for entry in entries:
            seen[entry.key][rank] = entry.value
    if lacks_gradients(ranks):
        reference = [entry for entry in reference if entry.key.stage not in _BY_ENGINE]
    scales = _usual_sizes(reference)
    partings = _partings(reference, seen, scales, allowed)
    first = next(partings, None)
    return None if first is None else _describe(first, [first, *partings], reference)


def lacks_gradients(ranks: Mapping[int, Sequence[TraceEntry]]) -> bool:
    """Whether the layout's gradients, and so its weight updates, are invisible to the trace."""
    first = (entries[0] for entries in ranks.values() if entries)
    return any(entry.key.stage is TraceStage.UNSEEN for entry in first)


class _PartedPlace(NamedTuple):
    """A place that differs."""

    key: Key
    reference: Fingerprint
    here: Fingerprint
    ranks: tuple[int, ...]
    deviation: float


def _partings(
    reference: Sequence[TraceEntry],
    seen: Mapping[Key, ByRank],
    scales: Mapping[tuple[int, TraceStage], float],
    allowed: Tolerance,
) -> Iterator[_PartedPlace]:
    for key, value in reference:
        if key.stage is TraceStage.FORWARD and key not in seen:
            continue  # compiled away, or a pipeline stage that has other names for its parts
        least = scales.get((key.step, key.stage), 0.0) * math.sqrt(value.numel)
        by_rank, most = seen.get(key, {}), allowed.of(key.stage)
        apart = {rank: deviation(here, value, least) for rank, here in by_rank.items()}
        wrong = tuple(rank for rank, far in apart.items() if far > most)
        if not by_rank:
            yield _PartedPlace(key, value, Fingerprint(0, 0.0, 0.0, 0.0), (), math.inf)
        elif wrong and _deviation_together(key.stage, by_rank, value) > most:
            rank = max(wrong, key=apart.__getitem__)
            yield _PartedPlace(key, value, by_rank[rank], wrong, apart[rank])


def _deviation_together(stage: TraceStage, by_rank: ByRank, reference: Fingerprint) -> float:
    """The deviation of the ranks' values combined, where ranks share a micro-batch."""
    parts = list(by_rank.values())
    if len(parts) < 2 or stage not in (TraceStage.DATA, TraceStage.FORWARD, TraceStage.LOSS):
        return math.inf
    if stage is TraceStage.LOSS:  # the terms of one sum
        return relative(sum(part.total for part in parts), reference.total)
    return deviation(together(parts), reference)


def _usual_sizes(reference: Sequence[TraceEntry]) -> dict[tuple[int, TraceStage], float]:
    """Per step and stage: the usual size of an element, times `_FAINT`."""
    squares: dict[tuple[int, TraceStage], float] = defaultdict(float)
    counts: dict[tuple[int, TraceStage], int] = defaultdict(int)
    for key, value in reference:
        if key.stage in _FLOORED and math.isfinite(value.norm) and key.place != "gradient norm":
            squares[key.step, key.stage] += value.norm**2
            counts[key.step, key.stage] += value.numel
    return {where: _FAINT * math.sqrt(squares[where] / counts[where]) for where in counts}


def _describe(
    first: _PartedPlace, partings: Sequence[_PartedPlace], reference: Sequence[TraceEntry]
) -> Divergence:
    step, stage, place, micro = first.key
    alike = [each for each in partings if each.key.step == step and each.key.stage is stage]
    num_places = sum(1 for key, _ in reference if key.step == step and key.stage is stage)
    is_number = first.reference.numel == 1
    return Divergence(
        step=step,
        stage=stage,
        place=place,
        micro=None if micro == NO_MICRO_BATCH else micro,
        ranks=first.ranks,
        reference=first.reference.total if is_number else first.reference.norm,
        here=first.here.total if is_number else first.here.norm,
        deviation=first.deviation,
        num_parting=len(alike),
        num_places=num_places,
        ratio=_common_ratio(alike),
    )


def _common_ratio(partings: Sequence[_PartedPlace]) -> float | None:
    """The common factor between all of them and the reference, if there is one."""
    if len(partings) < 2 or any(not each.reference.norm for each in partings):
        return None
    ratios = [each.here.norm / each.reference.norm for each in partings]
    projections = [
        abs(each.here.projection - ratio * each.reference.projection) / each.reference.norm
        for each, ratio in zip(partings, ratios, strict=True)
    ]
    is_common = max(ratios) - min(ratios) < 1e-3 * max(ratios) and max(projections) < 1e-3
    return ratios[0] if is_common else None

"""The request that the client sends to the ranks, and the results. Without torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from drivetrain.core.errors import ConfigError, Problem
from drivetrain.core.requirements import install_command
from drivetrain.core.statistics import MedianInterval, paired_ratio, ratio_of_medians

MODES = ("weak", "strong")
STRATEGIES = ("ddp", "fsdp")
"""Strategies for which torch has an engine. Other libraries are compared with the first."""
OTHERS = ("horovod", "ray")
"""Libraries that can take turns with ours, by module."""
LEAST_BATCH = 8
LOSS_STEPS = 10
"""Steps whose losses are compared with those of one process on the whole batch."""
LOSS_TOLERANCE = 1e-5
"""Relative. Ranks sum in a different order than one process, and fp32 has seven digits."""


def how_to_install(other: str) -> str:
    return install_command("ray") if other == "ray" else "`make horovod` builds and installs it"


@dataclass(frozen=True)
class ScalingRequest:
    """What to measure, and where to write the results."""

    strategies: tuple[str, ...]
    """Our strategies; each is compared with its bare engine."""
    beside: tuple[str, ...] = ()
    """Other libraries to measure: names in `OTHERS`."""
    modes: tuple[str, ...] = MODES
    sizes: tuple[int, ...] = ()
    """Numbers of ranks; empty: powers of two up to all of them."""
    batch_size: int | None = None
    """Samples per step: per rank (weak), in total (strong)."""
    steps_per_block: int = 10
    rounds: int = 10
    """Rounds per pass; each has a block of every arm."""
    passes: int = 2
    """Passes through the sizes, alternately up and down, so drift affects all sizes alike."""
    emulate_compute_ms: float | None = None
    """Time of `batch_size` samples on one rank, slept instead of computed."""
    width: int = 64
    layers: int = 4
    sequence_length: int = 32
    json_file: str | None = None
    plot_file: str | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ScalingRequest:
        given = json.loads(text)
        given |= {key: tuple(given[key]) for key in ("strategies", "beside", "modes", "sizes")}
        return cls(**given)


@dataclass(frozen=True)
class Setting:
    """One size of one mode."""

    mode: str
    num_ranks: int
    batch_size: int
    """As requested: per rank (weak), in total (strong)."""

    @property
    def rank_batch(self) -> int:
        return self.batch_size if self.mode == "weak" else self.batch_size // self.num_ranks

    @property
    def global_batch(self) -> int:
        return self.rank_batch * self.num_ranks

    @property
    def share(self) -> float:
        """Each rank's fraction of a one-rank step's compute."""
        return self.rank_batch / self.batch_size


def sizes_up_to(world_size: int) -> tuple[int, ...]:
    """Return the powers of two up to all ranks, and all ranks."""
    powers = [2**k for k in range(world_size.bit_length()) if 2**k <= world_size]
    return tuple(sorted({*powers, world_size}))


def resolved(asked: ScalingRequest, world_size: int) -> tuple[tuple[int, ...], int]:
    """Return the sizes and the batch size; ConfigError if the batch cannot be divided."""
    sizes = tuple(sorted({1, *(asked.sizes or sizes_up_to(world_size))}))
    if sizes[-1] > world_size:
        remedy = f"start {sizes[-1]} ranks (--nproc-per-node, --nnodes), or leave it out"
        rule = f"only {world_size} ranks were started"
        raise ConfigError([Problem("--sizes", rule, remedy, sizes[-1])])
    whole = math.lcm(*sizes)
    if asked.batch_size is None:
        return sizes, -(-LEAST_BATCH // whole) * whole
    if "strong" in asked.modes and asked.batch_size % whole:
        rule = f"strong scaling divides it among {', '.join(map(str, sizes))} ranks"
        remedy = f"use a multiple of {whole}"
        raise ConfigError([Problem("--batch-size", rule, remedy, asked.batch_size)])
    return sizes, asked.batch_size


@dataclass
class ArmSamples:
    """One arm at one size: seconds per step, block by block, in the order of rounds."""

    strategy: str
    """Our strategy that it is compared with."""
    arm: str
    seconds: list[float] = field(default_factory=list)
    loss_difference: float = 0.0
    """The largest relative difference to one process's losses."""


@dataclass
class SizeResult:
    """All arms of one size of one mode."""

    setting: Setting
    arms: dict[str, ArmSamples] = field(default_factory=dict)
    predicted_s: dict[str, float] = field(default_factory=dict)
    """The planner's step time, by strategy."""


OURS, BARE, AGAIN = "drivetrain", "bare", "bare again"


@dataclass(frozen=True)
class Line:
    """One arm at one size, as it is shown."""

    mode: str
    num_ranks: int
    strategy: str
    arm: str
    step_s: float
    speedup: MedianInterval
    """Samples per second, relative to bare torch on one rank."""
    to_bare: MedianInterval | None
    """Step time relative to the bare engine in the same round; None for the bare engine."""
    loss_difference: float
    predicted_s: float | None

    @property
    def efficiency(self) -> MedianInterval:
        one, n = self.speedup, self.num_ranks
        return MedianInterval(one.value / n, one.low / n, one.high / n)

    @property
    def is_same_training(self) -> bool:
        return self.loss_difference <= LOSS_TOLERANCE


def lines_of(results: Sequence[SizeResult]) -> list[Line]:
    """Compute figures from raw samples; speed-ups are relative to one rank of the same mode."""
    alone = {
        (each.setting.mode, one.strategy): (one.seconds, each.setting.global_batch)
        for each in results
        for one in each.arms.values()
        if each.setting.num_ranks == 1 and one.arm == BARE
    }
    found = []
    for each in results:
        for one in each.arms.values():
            seconds, batch = alone[each.setting.mode, one.strategy]
            times = ratio_of_medians(seconds, one.seconds)
            more = each.setting.global_batch / batch
            bare = each.arms[f"{one.strategy} {BARE}"]
            found.append(
                Line(
                    each.setting.mode,
                    each.setting.num_ranks,
                    one.strategy,
                    one.arm,
                    median(one.seconds),
                    MedianInterval(times.value * more, times.low * more, times.high * more),
                    None if one is bare else paired_ratio(one.seconds, bare.seconds),
                    one.loss_difference,
                    each.predicted_s.get(one.strategy),
                )
            )
    return found


def loss_difference(losses: Sequence[float], of_one_process: Sequence[float]) -> float:
    """Return the largest relative difference; infinite if a loss is NaN or missing."""
    pairs = list(zip(losses, of_one_process, strict=False))
    if len(pairs) < len(of_one_process):
        return math.inf
    apart = [abs(a - b) / max(abs(b), 1e-30) for a, b in pairs]
    return math.inf if any(math.isnan(each) for each in apart) else max(apart)


def results_document(
    asked: ScalingRequest, results: Sequence[SizeResult], about: Mapping[str, Any]
) -> dict[str, Any]:
    """Return all results, including raw samples."""
    return {
        **about,
        "asked": asdict(asked),
        "lines": [
            asdict(each) | {"efficiency": asdict(each.efficiency)} for each in lines_of(results)
        ],
        "samples": [asdict(each) for each in results],
    }

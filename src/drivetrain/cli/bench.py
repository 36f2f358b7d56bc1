"""`drivetrain bench`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from drivetrain.cli.planning import memory_size
from drivetrain.collectives.request import (
    OPERATIONS,
    REDUCTIONS,
    TYPES,
    CollectivesRequest,
    sizes_from,
)
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.parallel.layout import AXES
from drivetrain.scaling.request import MODES, OTHERS, STRATEGIES, ScalingRequest, how_to_install

_BITS = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_OTHER_NAMES = {"alltoall": "all_to_all", "sendrecv": "send_recv"}


@dataclass(frozen=True)
class TypedCollectives:
    """The command's options, as typed."""

    operations: str
    min_bytes: str
    max_bytes: str
    factor: int
    dtype: str
    redop: str
    axes: str
    calls: int | None
    comm_backend: str | None
    line_rate: str | None
    json_file: str | None
    plot_file: str | None
    cluster_file: str | None


def run_collectives(typed: TypedCollectives, launcher_args: Sequence[str]) -> int:
    """Run the benchmark on the ranks that `launcher_args` start, here or on a target.

    Return the exit code.
    """
    return _run_on_ranks("drivetrain.collectives.bench", request_of(typed), launcher_args)


def _run_on_ranks(
    module: str, asked: CollectivesRequest | ScalingRequest, launcher_args: Sequence[str]
) -> int:
    from drivetrain.cli.train import run

    if asked.plot_file is not None:
        from drivetrain.core.requirements import require

        require("matplotlib", extra="plan")
    # no restart after a failure: rows from before and after it would be of different runs
    own = ["--max-restarts", "0", "--spares", "0"]
    return run([*own, *launcher_args, "-m", module, asked.to_json()])


def request_of(typed: TypedCollectives) -> CollectivesRequest:
    """Check the options; ConfigError lists every problem."""
    problems: list[Problem] = []
    operations = tuple(
        _OTHER_NAMES.get(word, word) for word in typed.operations.replace("-", "_").split(",")
    )
    if operations == ("all",):
        operations = OPERATIONS
    choices: list[tuple[str, str, tuple[str, ...]]]
    choices = [("--ops", word, OPERATIONS) for word in operations]
    choices += [("--dtype", typed.dtype, tuple(TYPES)), ("--redop", typed.redop, REDUCTIONS)]
    for where, said, known in choices:
        if said not in known:
            problems.append(Problem(where, "unknown", f"use {', '.join(known)}", said))
    least, most = (
        memory_size(typed.min_bytes, "--min-bytes"),
        memory_size(typed.max_bytes, "--max-bytes"),
    )
    element = TYPES.get(typed.dtype, 1)
    if least < element:
        remedy = f"use {element} or more"
        problems.append(Problem("--min-bytes", "less than one element", remedy, typed.min_bytes))
    if most < least:
        problems.append(
            Problem("--max-bytes", "less than --min-bytes", "raise it", typed.max_bytes)
        )
    if typed.factor < 2:
        problems.append(Problem("--factor", "sizes would not grow", "use 2 or more", typed.factor))
    if typed.calls is not None and typed.calls < 1:
        problems.append(Problem("--iters", "must be at least 1", "use 1 or more", typed.calls))
    axes = _axes(typed.axes, problems)
    rate = None if typed.line_rate is None else _line_rate(typed.line_rate, problems)
    if problems:
        raise ConfigError(problems)
    return CollectivesRequest(
        operations=operations,
        sizes=sizes_from(least, most, typed.factor),
        dtype=typed.dtype,
        redop=typed.redop,
        axes=axes,
        calls=typed.calls,
        comm_backend=typed.comm_backend,
        line_rate_bytes_per_s=rate,
        json_file=_absolute(typed.json_file),
        plot_file=_absolute(typed.plot_file),
        cluster_file=_absolute(typed.cluster_file),
    )


def _axes(text: str, problems: list[Problem]) -> dict[str, int]:
    found: dict[str, int] = {}
    for word in filter(None, text.split(",")):
        axis, _, size = word.partition("=")
        if axis not in AXES or not re.fullmatch(r"-1|[1-9]\d*", size):
            remedy = f"write axis=ranks, such as tp=2,dp_shard=-1; axes are {', '.join(AXES)}"
            problems.append(Problem("--axes", "not understood", remedy, word))
        else:
            found[axis] = int(size)
    return found


def _line_rate(text: str, problems: list[Problem]) -> float | None:
    """Bytes per second of 10Gbit, 10Gbit/s or 1.25GB/s; prefixes are powers of ten, as for NICs."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kKmMgGtT])(bit|b|B)(?:/s|ps)?", text.strip())
    if found is None or not float(found[1]):
        remedy = "write 10Gbit (bits per second) or 25GB (bytes per second)"
        problems.append(Problem("--line-rate", "not a rate", remedy, text))
        return None
    rate = float(found[1]) * _BITS[found[2].lower()]
    return rate if found[3] == "B" else rate / 8


def _absolute(path: str | None) -> str | None:
    """An absolute path: ranks may start in another directory."""
    return None if path is None else str(Path(path).absolute())


@dataclass(frozen=True)
class TypedScaling:
    """The command's options, as typed."""

    strategies: str
    beside: str
    mode: str
    sizes: str
    batch_size: int | None
    emulate_compute_ms: float | None
    steps: int
    rounds: int
    passes: int
    width: int
    layers: int
    sequence_length: int
    json_file: str | None
    plot_file: str | None


def run_scaling(typed: TypedScaling, launcher_args: Sequence[str]) -> int:
    """Run the benchmark on the ranks that `launcher_args` start, here or on a target.

    Return the exit code.
    """
    # our ranks wait while another library starts its processes
    patient = ["--stall-timeout", "900", *launcher_args]
    return _run_on_ranks("drivetrain.scaling.bench", scaling_request_of(typed), patient)


def scaling_request_of(typed: TypedScaling) -> ScalingRequest:
    """Check the options; ConfigError lists every problem."""
    problems: list[Problem] = []
    modes = MODES if typed.mode == "both" else (typed.mode,)
    strategies = tuple(typed.strategies.split(","))
    choices: list[tuple[str, str, tuple[str, ...]]]
    choices = [("--mode", each, (*MODES, "both")) for each in modes if each not in MODES]
    choices += [("--strategies", e, STRATEGIES) for e in strategies if e not in STRATEGIES]
    for where, said, known in choices:
        problems.append(Problem(where, "unknown", f"use {', '.join(known)}", said))
    beside = _beside(typed.beside, problems)
    if beside and STRATEGIES[0] not in strategies and typed.beside != "installed":
        remedy = f"add {STRATEGIES[0]} to --strategies"
        problems.append(
            Problem("--beside", f"is compared with {STRATEGIES[0]}", remedy, typed.beside)
        )
    sizes = tuple(int(word) for word in typed.sizes.split(",") if word.isdigit())
    if any(not word.isdigit() or word == "0" for word in filter(None, typed.sizes.split(","))):
        problems.append(Problem("--sizes", "not numbers of ranks", "write 1,2,4", typed.sizes))
    at_least_one = {
        "--batch-size": typed.batch_size,
        "--emulate-compute": typed.emulate_compute_ms,
        "--steps": typed.steps,
        "--passes": typed.passes,
        "--layers": typed.layers,
        "--sequence-length": typed.sequence_length,
    }
    for flag, number in at_least_one.items():
        if number is not None and not number > 0:
            problems.append(Problem(flag, "must be more than 0", "raise it", number))
    if typed.rounds < 2:
        remedy = "use 2 or more"
        problems.append(Problem("--rounds", "an interval needs at least two", remedy, typed.rounds))
    if typed.width < 4 or typed.width % 4:
        remedy = "use a multiple of 4"
        problems.append(
            Problem("--width", "must be divisible by its four heads", remedy, typed.width)
        )
    if problems:
        raise ConfigError(problems)
    return ScalingRequest(
        strategies=strategies,
        beside=beside,
        modes=modes,
        sizes=sizes,
        batch_size=typed.batch_size,
        steps_per_block=typed.steps,
        rounds=typed.rounds,
        passes=typed.passes,
        emulate_compute_ms=typed.emulate_compute_ms,
        width=typed.width,
        layers=typed.layers,
        sequence_length=typed.sequence_length,
        json_file=_absolute(typed.json_file),
        plot_file=_absolute(typed.plot_file),
    )


def _beside(text: str, problems: list[Problem]) -> tuple[str, ...]:
    """The libraries to compare with: the named ones, which must be installed, or all installed."""
    there = tuple(name for name in OTHERS if find_spec(name) is not None)
    if text == "installed":
        return there
    named = () if text == "none" else tuple(text.split(","))
    for name in named:
        if name not in OTHERS:
            known = ", ".join((*OTHERS, "none"))
            problems.append(Problem("--beside", "unknown", f"use {known}", name))
        elif name not in there:
            problems.append(Problem("--beside", "not installed", how_to_install(name), name))
    return named

"""`drivetrain profile`."""

from __future__ import annotations

import gzip
import json
import os
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from drivetrain.cli.terminal import terminal
from drivetrain.cli.train import say_passed
from drivetrain.core.errors import ConfigError, EnvironmentProblem, Problem
from drivetrain.core.requirements import install_command
from drivetrain.diagnose.trace import Summary, summarize
from drivetrain.launch.guardian import guard
from drivetrain.launch.request import read_command
from drivetrain.record.requests import ProfileRequest


@dataclass(frozen=True)
class ProfileChoice:
    """The command's options."""

    ranks: str
    steps: str
    output: str
    py_spy: bool
    nsys: bool


def run(argv: list[str], choice: ProfileChoice) -> int:
    """Run the script with a profiler around the chosen steps, and print where their time went."""
    request = _request(choice)
    console = terminal()
    if choice.nsys:
        console.print(nsys_command(argv, request), markup=False, soft_wrap=True)
        return 0
    command = read_command(argv)
    say_passed(command.passed_flags, command.script)
    shutil.rmtree(request.folder, ignore_errors=True)
    os.environ.update(request.environment())
    code = guard(argv)
    if code:
        return code
    traces = sorted(Path(request.folder).glob("rank-*.trace.json.gz"))
    if not traces:
        raise EnvironmentProblem([_nothing(choice)])
    show({_rank(path): _summary(path) for path in traces}, console)
    console.print(f"\ntraces: {request.folder}  (open in https://ui.perfetto.dev, or TensorBoard)")
    return 0


def nsys_command(argv: list[str], request: ProfileRequest) -> str:
    """The command that does the same under NVIDIA's Nsight Systems; it is printed, not run."""
    command = [
        "nsys",
        "profile",
        "--trace=cuda,nvtx,osrt",
        "--sample=none",
        "--wait=all",
        f"--output={request.folder}/node-%h",
        *("drivetrain", "train", *argv),
    ]
    return shlex.join(command)


def show(summaries: dict[int, Summary], console: Console) -> None:
    """Print one line per rank, and the time of the first rank's operators."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    names = ("rank", "steps", "ms/step", "compute", "exposed comm.", "overlapped", "other")
    for name in names:
        table.add_column(name, justify="right")
    for rank, summary in summaries.items():
        wall_s = summary.wall_s or 1.0
        table.add_row(
            str(rank),
            str(summary.num_steps),
            f"{1e3 * wall_s / max(1, summary.num_steps):.1f}",
            f"{summary.compute_s / wall_s:.0%}",
            f"{summary.exposed_s / wall_s:.0%}",
            f"{summary.overlapped_s / wall_s:.0%}",
            f"{summary.other_s / wall_s:.0%}",
        )
    console.print(table)
    rank, first = next(iter(summaries.items()))
    console.print()
    tops = Table(box=None, pad_edge=False, header_style="bold")
    tops.add_column(f"operators of rank {rank}", overflow="fold")
    for name in ("calls/step", "ms/step", "share"):
        tops.add_column(name, justify="right", no_wrap=True)
    steps, total_s = max(1, first.num_steps), first.compute_s or 1.0
    for operator in first.top:
        tops.add_row(
            operator.name,
            f"{operator.num_calls / steps:.1f}",
            f"{1e3 * operator.self_s / steps:.2f}",
            f"{operator.self_s / total_s:.0%}",
        )
    console.print(tops)
    if first.short_share > 0.3:
        console.print(
            f"\nlaunch-bound: {first.short_share:.0%} of the operators' time is in calls shorter "
            "than 10 µs; use larger micro-batches, or compile=true"
        )


def _request(choice: ProfileChoice) -> ProfileRequest:
    first, _, last = choice.steps.partition(":")
    last = last or first
    ranks = [] if choice.ranks == "all" else choice.ranks.split(",")
    problems = []
    if not (first.isdigit() and last.isdigit() and 1 <= int(first) <= int(last)):
        rule = "not a range of steps"
        problems.append(Problem("--steps", rule, "give FIRST:LAST, from 1", choice.steps))
    if not all(rank.isdigit() for rank in ranks):
        problems.append(Problem("--ranks", "not ranks", "give 0,1,… or all", choice.ranks))
    if problems:
        raise ConfigError(problems)
    if choice.py_spy and not Path(sys.executable).with_name("py-spy").exists():
        remedy = install_command("profile")
        raise EnvironmentProblem([Problem("py-spy", "not installed", remedy, has_value=False)])
    folder = str(Path(choice.output).absolute())
    return ProfileRequest(folder, tuple(map(int, ranks)), int(first), int(last), choice.py_spy)


def _nothing(choice: ProfileChoice) -> Problem:
    rule = "the run has no such step, or the script does not train with Trainer"
    return Problem("--steps", rule, "choose steps that the run reaches", choice.steps)


def _summary(path: Path) -> Summary:
    return summarize(json.loads(gzip.decompress(path.read_bytes())))


def _rank(path: Path) -> int:
    return int(path.name[5:10])

"""`benchmarks all-reduces`: the course's own all-reduces by size, on hosts with limited links.

Eight hosts with one rank each, gloo. In each round every algorithm has its turn at every size, and
the ring a second one (A/A). A round's time is that of the slowest rank. Beside them what the ring
and halving are made of: a message between two ranks one way, and one each way at once.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.links.on_hosts import Host, MakeHosts, run_ranks_on
from benchmarks.report import machine
from drivetrain.core.errors import WorkerFailure
from drivetrain.core.statistics import paired_ratio

NUM_RANKS, RATE_MBIT = 8, 200.0
SIZES = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 22)
ARMS = ("ring", "halving", "tree", "naive", "ring again")
BASELINE = ARMS[0]
PAIRS = ("one way", "both ways")
PAIR_SIZES = (1 << 19, 1 << 21, 1 << 23)
_GIVE_UP_S = 900.0


Seconds = dict[str, dict[str, list[float]]]
"""By size and arm, round by round."""
Call = Callable[[Any], None]
"""Takes a rank's tensor."""


def run_all_reduces(output: Path, rounds: int, make_hosts: MakeHosts) -> str:
    """All sizes and algorithms in turns; the table."""
    output.mkdir(parents=True, exist_ok=True)
    with make_hosts(NUM_RANKS, RATE_MBIT) as hosts:
        measured = _on(hosts, rounds)
    document = {"machine": machine(), "rounds": rounds, **measured}
    (output / "samples.json").write_text(json.dumps(document) + "\n")
    table = make_table(document)
    (output / "table.md").write_text(table)
    return table


def _on(hosts: Sequence[Host], rounds: int) -> dict[str, Seconds]:
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        run_ranks_on(hosts, ["benchmarks.links.all_reduces", str(rounds), str(found)], _GIVE_UP_S)
        measured: dict[str, Seconds] = json.loads(found.read_text())
    return measured


def _measure(rounds: int, found: Path) -> None:
    """One rank."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    measured = {
        "seconds": _in_turns({arm: _checked(arm) for arm in ARMS}, SIZES, rounds),
        "pairs": _in_turns({way: _between_two(way) for way in PAIRS}, PAIR_SIZES, rounds),
    }
    if dist.get_rank() == 0:
        found.write_text(json.dumps(measured))
    dist.destroy_process_group()


def _in_turns(calls: dict[str, Call], sizes: Sequence[int], rounds: int) -> Seconds:
    import torch
    import torch.distributed as dist

    seconds: Seconds = {str(size): {name: [] for name in calls} for size in sizes}
    for number in range(rounds + 1):
        for size in sizes:
            for name, call in calls.items():
                tensor = torch.full((size // 4,), dist.get_rank() + 1.0)
                dist.barrier()
                began = time.perf_counter()
                call(tensor)
                took = torch.tensor(time.perf_counter() - began)
                dist.all_reduce(took, dist.ReduceOp.MAX)
                if number:  # the first connects
                    seconds[str(size)][name].append(took.item())
    return seconds


def _checked(arm: str) -> Call:
    """The solution of that name; a wrong sum ends the measurement."""
    import torch.distributed as dist

    from drivetrain.learn.attempt import load
    from drivetrain.learn.exercises import exercise_named

    name = arm.removesuffix(" again")
    all_reduce = getattr(load(exercise_named(f"{name}_allreduce").solution), f"{name}_all_reduce")
    num_ranks = dist.get_world_size()

    def call(tensor: Any) -> None:
        all_reduce(tensor)
        if not (tensor == num_ranks * (num_ranks + 1) / 2).all():
            raise WorkerFailure(f"{arm} gives a wrong sum of {len(tensor)} values")

    return call


def _between_two(way: str) -> Call:
    """Neighbours: the even one to the odd one, or both at once."""
    import torch
    import torch.distributed as dist

    rank, partner = dist.get_rank(), dist.get_rank() ^ 1

    def call(tensor: Any) -> None:
        sends = way == "both ways" or rank < partner
        sending = dist.isend(tensor, partner) if sends else None
        if way == "both ways" or rank > partner:
            dist.recv(torch.empty_like(tensor), partner)
        if sending is not None:
            sending.wait()

    return call


def make_table(document: dict[str, Any]) -> str:
    """Medians over rounds, each against the ring's of the same round."""
    by_size: Seconds = document["seconds"]
    lines = [
        f"{NUM_RANKS} hosts (network namespaces), one rank each, gloo, each link limited to "
        f"{RATE_MBIT:g} Mbit/s; {document['rounds']} rounds, "
        + ", ".join(f"{name} {value}" for name, value in document["machine"].items())
        + ".",
        "",
        "| bytes | " + " | ".join(ARMS[:-1]) + " | halving / ring | A/A |",
        "| ---: |" + " ---: |" * (len(ARMS) + 1),
    ]
    for size, by_arm in by_size.items():
        cells = [f"{1e3 * median(by_arm[arm]):.1f} ms" for arm in ARMS[:-1]]
        for arm in ("halving", "ring again"):
            ratio = paired_ratio(by_arm[arm], by_arm[BASELINE])
            cells.append(f"{ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f})")
        lines.append(f"| {int(size):,} | " + " | ".join(cells) + " |")
    lines += [
        "",
        f"Between two ranks, where the link needs 8 × bytes / {RATE_MBIT:g} Mbit/s either way:",
        "",
        "| bytes | the link | one way | both ways |",
        "| ---: | ---: | ---: | ---: |",
    ]
    for size, by_way in document["pairs"].items():
        cells = [f"{8e3 * int(size) / (RATE_MBIT * 1e6):.1f} ms"]
        cells += [f"{1e3 * median(by_way[way]):.1f} ms" for way in PAIRS]
        lines.append(f"| {int(size):,} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    _measure(int(sys.argv[1]), Path(sys.argv[2]))

"""`benchmarks collectives`: what `drivetrain bench collectives` says, held against what is known.

- its timed call next to torch's own calls in a plain loop, in turns in the same processes;
- no element wrong on 2 to 8 ranks;
- the bandwidth that it measures between two hosts next to the rate their link is shaped to.
"""

from __future__ import annotations

import json
import os
import platform
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.links.on_hosts import MakeHosts
from drivetrain.core.errors import WorkerFailure
from drivetrain.core.statistics import MedianInterval

SIZES = (8, 1 << 16, 1 << 22)
ARM_S, AGAIN = 1.5, "plain loop again"
QUIET = 0.1
"""Calls that nothing else on the machine has held up: a tenth of them is taken to be."""
WORLDS = range(2, 9)
LINKS = ((2, 1, 100.0), (2, 1, 400.0), (2, 2, 400.0))
"""(hosts, ranks on each, Mbit/s)"""
_GIVE_UP_S = 900.0
Document = dict[str, Any]


def run_collectives(output: Path, rounds: int, make_hosts: MakeHosts) -> str:
    """All three, each written down when it is done; the tables."""
    from drivetrain.testing import run_ranks

    output.mkdir(parents=True, exist_ok=True)
    ratios = run_ranks(in_turns, 2, 1500, (rounds,))[0]
    ratio = {"machine": _machine(), "timer_s": timer_s(), "seconds_per_call": ratios}
    _write(output / "ratio.json", ratio)
    rows = {str(world): json.loads(run_ranks(every_row, world, 1500)[0]) for world in WORLDS}
    _write(output / "wrong.json", {"machine": _machine(), "ranks": rows})
    links = [_on_link(make_hosts, *link) for link in LINKS]
    _write(output / "links.json", {"machine": _machine(), "links": links})
    return report(output)


def _write(path: Path, document: Document) -> None:
    path.write_text(json.dumps(document, indent=1) + "\n")


def _machine() -> dict[str, Any]:
    import torch

    cores = len(os.sched_getaffinity(0))
    load = round(os.getloadavg()[0], 1)
    return {"cores": cores, "torch": torch.__version__, "python": platform.python_version()} | {
        "load": load
    }


# Our timed call next to torch's own, in a plain loop.


def plain_loops(size: int) -> dict[str, Callable[[int], None]]:  # noqa: C901 - one each
    """As anybody would write them."""
    import torch
    import torch.distributed as dist

    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # torch's new names
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    n, count = dist.get_world_size(), size // 4
    part_count = max(4, count // n)
    whole, part = torch.zeros(n * part_count), torch.zeros(part_count)
    tensor, received = torch.zeros(count), torch.zeros(n * part_count)

    def all_reduce(calls: int) -> None:
        for _ in range(calls):
            dist.all_reduce(tensor)

    def all_gather(calls: int) -> None:
        for _ in range(calls):
            gather(whole, part)

    def reduce_scatter(calls: int) -> None:
        for _ in range(calls):
            scatter(part, whole)

    def broadcast(calls: int) -> None:
        for _ in range(calls):
            dist.broadcast(tensor, 0)

    def all_to_all(calls: int) -> None:
        for _ in range(calls):
            dist.all_to_all_single(received, whole)

    def barrier(calls: int) -> None:
        for _ in range(calls):
            dist.barrier()

    found = [all_reduce, all_gather, reduce_scatter, broadcast, all_to_all]
    return {each.__name__: each for each in ([*found, barrier] if size == SIZES[0] else found)}


def timer_s() -> float:
    """What is timed of a call that does nothing: all that the timer can add to one that does."""
    import torch

    from drivetrain.collectives.measure import timed
    from drivetrain.parallel.accelerator import accelerator_of

    return _quiet(timed(int, 100_000, accelerator_of(torch.device("cpu"))))


def in_turns(rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds per call, one call in turn: ours, a plain loop, and a plain loop again."""
    import torch
    import torch.distributed as dist

    from drivetrain.collectives.measure import join, timed
    from drivetrain.collectives.operations import Form, prepare
    from drivetrain.collectives.request import SHARED, rank_sets
    from drivetrain.parallel.accelerator import accelerator_of

    device = torch.device("cpu")
    member = join(rank_sets([0] * dist.get_world_size(), {})[0], device)
    found: dict[str, dict[str, list[float]]] = {}
    for size in SIZES:
        for operation, loop in plain_loops(size).items():
            count = size // 4
            if operation in SHARED:
                count = max(4, count // member.number)
            is_in_place = operation in ("all_reduce", "broadcast")
            prepared = prepare(operation, member, Form(count, "float", "sum", is_in_place))
            assert prepared is not None  # noqa: S101 - each has the form that is asked for

            def ours(calls: int, call: Any = prepared.call) -> float:
                return sum(timed(call, calls, accelerator_of(device))) / calls

            def plain(calls: int, loop: Any = loop) -> float:
                began = time.perf_counter()
                loop(calls)
                return (time.perf_counter() - began) / calls

            arms = {"bench collectives": ours, "plain loop": plain, AGAIN: plain}
            name = f"{operation}, {size} B" if operation != "barrier" else operation
            found[name] = {arm: [] for arm in arms}
            for number in range(_rounds(plain, rounds)):
                for arm in (list(arms) * 2)[number % 3 : number % 3 + 3]:
                    found[name][arm].append(arms[arm](1))
    return found


def _rounds(plain: Callable[[int], float], most: int) -> int:
    """The same on all ranks."""
    import torch
    import torch.distributed as dist

    plain(2)
    rounds = torch.tensor([max(20, min(most, int(ARM_S / plain(3))))])
    dist.all_reduce(rounds, op=dist.ReduceOp.MIN)
    return int(rounds)


# Nothing wrong, at any number of ranks.


def every_row() -> str:
    """Every operation, small and large, in two types; the document of `--json`."""
    import torch
    import torch.distributed as dist

    from drivetrain.collectives.measure import measure_all
    from drivetrain.collectives.request import OPERATIONS, CollectivesRequest, rank_sets
    from drivetrain.collectives.show import to_dict

    sets = rank_sets([0] * dist.get_world_size(), {})
    found = {}
    for dtype in ("float", "bfloat16"):
        asked = CollectivesRequest(OPERATIONS, (1 << 9, 1 << 14, 1 << 20), dtype=dtype, calls=3)
        found[dtype] = to_dict(measure_all(asked, sets, torch.device("cpu")))[0]["rows"]
    return json.dumps(found)


# Two hosts on a link of a known rate, by the verb itself.


def _on_link(make_hosts: MakeHosts, hosts: int, ranks: int, rate_mbit: float) -> Document:
    flags = f"--nnodes {hosts} --nproc-per-node {ranks} --line-rate {rate_mbit:g}Mbit"
    flags += " --ops all_reduce,all_gather,reduce_scatter,send_recv"
    flags += " --min-bytes 256K --max-bytes 4M --factor 4 --iters 5"
    with make_hosts(hosts, rate_mbit) as made, tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "found.json"
        verb = [sys.executable, "-m", "drivetrain", "bench", "collectives", *flags.split()]
        verb += ["--json", str(raw), "--run-dir", f"{folder}/run"]
        with ExitStack() as stack:
            processes = []
            for host in made:
                process = host.popen(verb, env={**os.environ, "OMP_NUM_THREADS": "1"})
                stack.callback(process.kill)
                processes.append(process)
            codes = [process.wait(_GIVE_UP_S) for process in processes]
            if any(codes):
                raise WorkerFailure("the measurement failed; its error stands above")
        return {
            "hosts": hosts,
            "ranks_per_host": ranks,
            "rate_mbit": rate_mbit,
            "flags": flags,
            "found": json.loads(raw.read_text()),
        }


# Tables.


def report(output: Path) -> str:
    """table.md, from what was written down."""
    read = {
        name: json.loads((output / f"{name}.json").read_text())
        for name in ("ratio", "wrong", "links")
    }
    parts = [
        _ratio_table(read["ratio"]["seconds_per_call"], read["ratio"]["timer_s"]),
        _wrong_table(read["wrong"]["ranks"]),
        _link_table(read["links"]["links"]),
    ]
    about = ", ".join(f"{name} {value}" for name, value in read["ratio"]["machine"].items())
    table = "\n".join([f"{about} (other programs among it).", *parts])
    (output / "table.md").write_text(table)
    return table


def _ratio_table(seconds: dict[str, dict[str, list[float]]], timer: float) -> str:
    lines = [
        "",
        "2 ranks, gloo: one call after another, in turns with torch's own in a plain loop; the",
        "time that a tenth of the calls stays below, and its ratio, with bootstrap 95% intervals.",
        "",
        "| call | calls | plain loop | bench collectives / plain loop | again / plain loop |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    ours, again = [], []
    for name, arms in seconds.items():
        plain = arms["plain loop"]
        both = [quiet_ratio(arms[arm], plain) for arm in ("bench collectives", AGAIN)]
        ours.append(both[0].value)
        again.append(both[1].value)
        cells = [f"{e.value:.3f} ({e.low:.3f} to {e.high:.3f})" for e in both]
        cells = [name, str(len(plain)), f"{_quiet(plain) * 1e6:.0f} µs", *cells]
        lines.append("| " + " | ".join(cells) + " |")
    lines.append(f"| median of these | | | {median(ours):.3f} | {median(again):.3f} |")
    lines += ["", f"Of a call that does nothing, the timer takes {timer * 1e9:.0f} ns."]
    return "\n".join([*lines, ""])


def _quiet(values: Sequence[float]) -> float:
    return sorted(values)[int(QUIET * len(values))]


def quiet_ratio(samples: Sequence[float], baseline: Sequence[float]) -> MedianInterval:
    """Of the calls that were not held up, with the 95% interval of its bootstrap over rounds."""
    draw, number = random.Random(0), len(samples)  # noqa: S311 - statistics, not secrets
    ratios = []
    for _ in range(1000):
        rounds = draw.choices(range(number), k=number)
        ratios.append(_quiet([samples[r] for r in rounds]) / _quiet([baseline[r] for r in rounds]))
    ratios.sort()
    return MedianInterval(_quiet(samples) / _quiet(baseline), ratios[25], ratios[974])


def _wrong_table(rows: dict[str, Any]) -> str:
    lines = ["", "| ranks | rows | elements checked | wrong |", "| ---: | ---: | ---: | ---: |"]
    for world, by_type in rows.items():
        found = [row for each in by_type.values() for row in each]
        placed = [
            (row, row[placement])
            for row in found
            for placement in ("out_of_place", "in_place")
            if row[placement] is not None and row[placement]["wrong"] is not None
        ]
        checked = sum(2 * _received(row, int(world)) for row, _ in placed)
        wrong = sum(times["wrong"] for _, times in placed)
        lines.append(f"| {world} | {len(found)} | {checked:,} | {wrong} |")
    return "\n".join([*lines, ""])


def _received(row: Document, ranks: int) -> int:
    """Elements that one call leaves on all ranks together, and that are looked at."""
    by_operation = {
        "reduce": 1,
        "gather": ranks,
        "scatter": ranks,
        "reduce_scatter": ranks,
        "all_gather": ranks * ranks,
        "all_to_all": ranks * ranks,
    }
    return int(row["count"]) * by_operation.get(row["operation"], ranks)


def _link_table(links: Sequence[Document]) -> str:
    lines = [
        "",
        "4 MiB a call, between hosts (network namespaces) that send at most so much each; of the",
        "line rate: what all rings over the link carry together.",
        "",
        "| hosts × ranks | shaped to | ranks of | call | busbw | of the line rate |",
        "| --- | ---: | --- | --- | ---: | ---: |",
    ]
    for link in links:
        for each in link["found"]["sets"]:
            name = each["name"]
            is_inside = name == "inside a node"
            rings = link["ranks_per_host"] if name == "between nodes" else 1
            for row in each["rows"]:
                if row["size"] != 1 << 22:
                    continue
                busbw = (row["out_of_place"] or row["in_place"])["busbw_gb_per_s"] * 8e3
                part = "–" if is_inside else f"{rings * busbw / link['rate_mbit']:.1%}"
                lines.append(
                    f"| {link['hosts']} × {link['ranks_per_host']} | {link['rate_mbit']:g} Mbit/s "
                    f"| {name} | {row['operation']} | {busbw:.1f} Mbit/s | {part} |"
                )
    return "\n".join([*lines, ""])

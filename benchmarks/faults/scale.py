"""`python -m benchmarks scale`: the control plane with thousands of simulated ranks on one machine.

Nothing here trains. Ranks are pages that a simulator writes to, nodes are rendezvous handlers; the
code that reads the pages, learns the time-out, notices a silent rank and forms the group of nodes
is what supervises a real run. In a real run each node has only its own ranks to look at; here one
process looks at all of them, which is the harder case.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from drivetrain.record.session import Phase, ProgressPage, page_path, read_progress
from drivetrain.supervise.rendezvous.handler import join_in_folder
from drivetrain.supervise.stall import Patience, StallWatch

_STEP_S = 0.5
_RANKS = (8, 100, 1_000, 10_000)
_NODES = (1, 8, 32, 128, 512, 1_250)
_GIVE_UP_S = 240.0
_FAILED = -1


def run_scale(output: Path, ranks: Sequence[int] = _RANKS, nodes: Sequence[int] = _NODES) -> str:
    """Progress tracking by number of ranks, meeting by number of nodes; the table."""
    output.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[dict[str, Any]]] = {"ranks": [], "nodes": []}
    for count in ranks:
        found["ranks"].append(watch_ranks(count))
    for count in nodes:
        # forked from a process that has done nothing else, nodes share most of their memory
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
            found["nodes"].append(fresh.submit(meet_nodes, count).result())
        if found["nodes"][-1]["seconds"] is None:
            break
    (output / "samples.json").write_text(json.dumps(found, indent=1) + "\n")
    table = make_table(found)
    (output / "table.md").write_text(table)
    return table


def watch_ranks(count: int) -> dict[str, Any]:
    """Watch pages that take a step twice a second, until one of them falls silent."""
    with tempfile.TemporaryDirectory(prefix="scale-") as folder:
        session = Path(folder)
        pages = [ProgressPage(page_path(session, rank)) for rank in range(count)]
        watch = StallWatch(Patience(stepping_s=1.0))
        writes_s, looks_s = [], []
        silent_since_s, noticed_s, allowed_s = 0.0, None, 0.0
        cpu_before_s, began_s = time.process_time(), time.monotonic()
        victim = count // 2
        for step in range(1, 30):
            now_s = time.monotonic()
            for rank, page in enumerate(pages):
                if step <= 6 or rank != victim:
                    page.note(Phase.STEPPING, step)
            writes_s.append((time.monotonic() - now_s) / count)
            if step == 6:
                silent_since_s = time.monotonic()
            look_s = time.monotonic()
            stall = watch.observe([read_progress(session, r) for r in range(count)], look_s)
            looks_s.append(time.monotonic() - look_s)
            if stall is not None:
                noticed_s = time.monotonic() - silent_since_s
                allowed_s = stall.allowed_s
                break
            time.sleep(max(0.0, _STEP_S - (time.monotonic() - now_s)))
        looks_s.sort()
        for page in pages:
            page.close()
        return {
            "ranks": count,
            "write_us": 1e6 * sorted(writes_s)[len(writes_s) // 2],
            "look_ms": 1e3 * looks_s[len(looks_s) // 2],
            "cpu_share": (time.process_time() - cpu_before_s) / (time.monotonic() - began_s),
            "memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "allowed_s": allowed_s,
            "noticed_s": noticed_s,
        }


def meet_nodes(count: int) -> dict[str, Any]:
    """Let so many nodes form a group in one folder; how long until the last one knows its rank.

    Each is a process, as a node's supervisor is, forked from this one: a thousand that import torch
    themselves would need the memory of a cluster.
    """
    context = multiprocessing.get_context("fork")
    gc.freeze()  # else every fork copies what its garbage collector looks at
    with tempfile.TemporaryDirectory(prefix="scale-") as folder:
        meet = Path(folder) / "meet"
        answers: Any = context.SimpleQueue()
        is_over = context.Event()
        arguments = (meet, count, answers, is_over)
        nodes = [context.Process(target=_join, args=arguments, daemon=True) for _ in range(count)]
        cpu_before_s, began_s = _children_s(), time.monotonic()
        for node in nodes:
            node.start()
        ranks = [answers.get() for _ in nodes]
        took_s = time.monotonic() - began_s
        state_bytes = (meet / "state").stat().st_size
        is_over.set()
        for node in nodes:
            node.join()
        return {
            "nodes": count,
            "seconds": took_s if sorted(ranks) == list(range(count)) else None,
            "cpu_s": _children_s() - cpu_before_s,
            "state_kb": state_bytes / 1024,
            "failures": ranks.count(_FAILED),
        }


def _join(folder: Path, count: int, answers: Any, is_over: Any) -> None:
    """One node: join, say which rank it was given, and live until all have."""
    settings = {"join_timeout": int(_GIVE_UP_S), "keep_alive_interval": 10}
    handler = join_in_folder(folder, (count, count), "127.0.0.1", settings)
    # the round's store is left out: one connection per node, for each of which torch asks
    # for the peer's name, and a thousand questions at once would time the name server
    handler._get_store = lambda: None  # type: ignore[method-assign,assignment,return-value]  # noqa: SLF001
    handler._bootstrap_store_info = handler._shared_tcp_store_server = object()  # type: ignore[assignment]  # noqa: SLF001
    try:
        answers.put(handler.next_rendezvous().rank)
    except Exception:  # counted by whoever asked
        answers.put(_FAILED)
    is_over.wait(_GIVE_UP_S)
    handler._stop_heartbeats()  # noqa: SLF001


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def make_table(found: dict[str, list[dict[str, Any]]]) -> str:
    """Two tables, for people."""
    lines = [
        "One process watches all ranks, which take a step twice a second; then one falls silent.",
        "",
        "| ranks | writing a page | looking at all | CPU share | memory | allowed | noticed in |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {r['ranks']:,} | {r['write_us']:.1f} µs | {r['look_ms']:.1f} ms | {r['cpu_share']:.0%} "
        f"| {r['memory_mb']:.0f} MB | {r['allowed_s']:.2f} s | {r['noticed_s']:.2f} s |"
        for r in found["ranks"]
    ]
    lines += [
        "",
        "Nodes that form a group in one folder, all at once: each a process with the code of a "
        "real supervisor, all of them on this machine.",
        "",
        "| nodes | until the last knows its rank | CPU | state |",
        "| ---: | ---: | ---: | ---: |",
    ]
    for n in found["nodes"]:
        took = "not within the time" if n["seconds"] is None else f"{n['seconds']:.1f} s"
        lines.append(f"| {n['nodes']:,} | {took} | {n['cpu_s']:.1f} s | {n['state_kb']:.0f} kB |")
    return "\n".join(lines) + "\n"

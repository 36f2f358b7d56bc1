"""`python -m benchmarks scale`: the control plane with thousands of simulated ranks on one machine.

Nothing here trains. Ranks are pages that a simulator writes to, nodes are rendezvous handlers; the
code that reads the pages, learns the time-out, notices a silent rank and forms the group of nodes
is what supervises a real run. In a real run each node has only its own ranks to look at; here one
process looks at all of them, which is the harder case.
"""

from __future__ import annotations

import json
import resource
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drivetrain.record.session import Phase, ProgressPage, page_path, read_progress
from drivetrain.supervise.rendezvous.handler import join_in_folder
from drivetrain.supervise.stall import Patience, StallWatch

_STEP_S = 0.5
_RANKS = (8, 100, 1_000, 10_000)
_NODES = (1, 8, 32, 128, 512, 1_250)
_GIVE_UP_S = 240.0


def run_scale(output: Path, ranks: Sequence[int] = _RANKS, nodes: Sequence[int] = _NODES) -> str:
    """Progress tracking by number of ranks, meeting by number of nodes; the table."""
    output.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[dict[str, Any]]] = {"ranks": [], "nodes": []}
    for count in ranks:
        found["ranks"].append(watch_ranks(count))
    for count in nodes:
        found["nodes"].append(meet_nodes(count))
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
    """Let so many nodes form a group in one folder; how long until the last one knows its rank."""
    with tempfile.TemporaryDirectory(prefix="scale-") as folder:
        settings = {"join_timeout": int(_GIVE_UP_S), "keep_alive_interval": 10}
        handlers = [
            join_in_folder(Path(folder) / "meet", (count, count), "127.0.0.1", settings)
            for _ in range(count)
        ]
        ranks: list[int] = []

        def join(index: int) -> None:
            handler = handlers[index]
            # the round's store is left out: one connection per node, for each of which torch asks
            # for the peer's name, and a thousand questions at once would time the name server
            handler._get_store = lambda: None  # type: ignore[method-assign,assignment,return-value]  # noqa: SLF001
            handler._bootstrap_store_info = handler._shared_tcp_store_server = object()  # type: ignore[assignment]  # noqa: SLF001
            try:
                ranks.append(handler.next_rendezvous().rank)
            except Exception as error:  # counted below
                failures.append(repr(error))

        failures: list[str] = []
        cpu_before_s, began_s = time.process_time(), time.monotonic()
        threads = [threading.Thread(target=join, args=(index,)) for index in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        took_s = time.monotonic() - began_s
        cpu_s = time.process_time() - cpu_before_s
        state_bytes = (Path(folder) / "meet" / "state").stat().st_size
        for handler in handlers:
            handler._stop_heartbeats()  # noqa: SLF001
        is_whole = sorted(ranks) == list(range(count))
        return {
            "nodes": count,
            "seconds": took_s if is_whole else None,
            "cpu_s": cpu_s,
            "state_kb": state_bytes / 1024,
            "failures": len(failures),
        }


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
        "Nodes that form a group in one folder, all at once, simulated as threads of one process: "
        "each with the code of a real supervisor, all of them on one interpreter.",
        "",
        "| nodes | until the last knows its rank | CPU | state |",
        "| ---: | ---: | ---: | ---: |",
    ]
    for n in found["nodes"]:
        took = "not within the time" if n["seconds"] is None else f"{n['seconds']:.1f} s"
        lines.append(f"| {n['nodes']:,} | {took} | {n['cpu_s']:.1f} s | {n['state_kb']:.0f} kB |")
    return "\n".join(lines) + "\n"

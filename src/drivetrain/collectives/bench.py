"""One rank of `drivetrain bench collectives`; rank 0 prints the rows and writes the files."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from drivetrain._version import __version__
from drivetrain.cluster.environments import detect
from drivetrain.cluster.file import write_links
from drivetrain.collectives.measure import join, measure, nodes_of_ranks
from drivetrain.collectives.request import (
    CollectivesRequest,
    Measured,
    RankSet,
    exchange_of,
    rank_sets,
)
from drivetrain.collectives.show import as_typed, heading, line, plot, say, summary, to_dict
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.parallel.accelerator import Accelerator, accelerator_of, use_device_of
from drivetrain.parallel.layout import AXES, Layout


def axis_groups(axes: dict[str, int], world_size: int) -> dict[str, list[tuple[int, ...]]]:
    """Return the groups of each axis that has more than one rank, but not all of them."""
    if not axes:
        return {}
    layout = Layout.resolve(world_size, **axes)
    return {
        axis: layout.groups(axis)
        for axis, size in zip(AXES, layout.sizes, strict=True)
        if 1 < size < world_size
    }


def init_process_group(accelerator: Accelerator, said: str | None) -> str:
    """Initialize the group, with gloo for CPU tensors; return the backend for device tensors."""
    if dist.is_initialized():  # by a test
        return str(dist.get_backend())
    if said is None or (accelerator.is_cpu and said == "gloo"):
        backend = accelerator.backend
    elif not dist.is_backend_available(said):
        rule = "this torch was built without it"
        raise ConfigError([Problem("--comm-backend", rule, "leave it out", said)])
    else:
        backend = said if accelerator.is_cpu else f"cpu:gloo,{accelerator.device.type}:{said}"
    dist.init_process_group(backend)
    return backend.rpartition(":")[2]


def run(asked: CollectivesRequest) -> list[Measured]:
    """Run the benchmark on every rank; rank 0 prints."""
    identity = detect()
    accelerator = accelerator_of(use_device_of(identity.local_rank))
    if identity.world_size < 2:
        remedy = "add --nproc-per-node 2 or more nodes"
        raise ConfigError([Problem("ranks", "collectives need at least two ranks", remedy, 1)])
    backend = init_process_group(accelerator, asked.comm_backend)
    is_main = dist.get_rank() == 0
    node_of = nodes_of_ranks()
    sets = rank_sets(node_of, axis_groups(dict(asked.axes), len(node_of)))
    about = {
        "drivetrain": __version__,
        "torch": torch.__version__,
        "backend": backend,
        "device": accelerator.name,
        "ranks": len(node_of),
        "nodes": len(set(node_of)),
    }
    title = ", ".join(f"{name} {value}" for name, value in about.items())
    if is_main:
        say(f"# {title}")
    found = [_measure_set(asked, each, node_of, accelerator.device) for each in sets]
    if is_main:
        for text in summary(found):
            say(text)
        _write(asked, found, about, title)
    return found


def _measure_set(
    asked: CollectivesRequest, ranks: RankSet, node_of: list[int], device: torch.device
) -> Measured:
    is_main, line_rate = dist.get_rank() == 0, asked.line_rate_bytes_per_s
    # on one node the line rate is that of the link inside it
    rings = ranks.rings_per_link(node_of) if len(set(node_of)) > 1 else 1
    member, rows, operation = join(ranks, device), [], ""
    for row in measure(asked, ranks, member):
        rows.append(row)
        if is_main and row.operation != operation:
            say("#")
            for text in heading(ranks, line_rate is not None, row.operation):
                say(text)
        operation = row.operation
        if is_main:
            say(line(row, line_rate, rings))
    return Measured(ranks, tuple(rows))


def _write(
    asked: CollectivesRequest, found: list[Measured], about: dict[str, Any], title: str
) -> None:
    if asked.json_file is not None:
        document = {**about, "asked": json.loads(asked.to_json()), "sets": to_dict(found)}
        Path(asked.json_file).write_text(json.dumps(document, indent=1) + "\n")
        say(f"# written: {as_typed(Path(asked.json_file))}")
    if asked.plot_file is not None:
        plot(found, title, asked.line_rate_bytes_per_s, Path(asked.plot_file))
        say(f"# written: {as_typed(Path(asked.plot_file))}")
    if asked.cluster_file is not None:
        nodes, path = about["nodes"], Path(asked.cluster_file)
        if write_links(path, exchange_of(found, nodes), nodes, about["ranks"] // nodes):
            say(f"# written: {as_typed(path)}")
        else:
            say(f"# not written: {as_typed(path)}; a fit needs all_reduce at two sizes or more")


def main() -> None:
    found = run(CollectivesRequest.from_json(sys.argv[1]))
    dist.destroy_process_group()
    if any(row.wrong for each in found for row in each.rows):
        sys.exit(1)


if __name__ == "__main__":
    main()

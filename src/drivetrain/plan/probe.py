"""Measure a device's real performance on one rank, while the other ranks measure theirs.

`drivetrain probe` starts it on as many ranks as will train, because with shared processors, memory
and links a single rank would measure more than its share. Rank 0 writes the results to a file.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from drivetrain.cluster.exchange import PLANNED
from drivetrain.collectives.measure import measure_all, nodes_of_ranks
from drivetrain.collectives.request import CollectivesRequest, exchange_of, rank_sets
from drivetrain.parallel.accelerator import accelerator_of, use_device_of

# The sizes of a probe's operations: on an accelerator, too large for its cache. Pure functions.
#
# A tensor that fits into the last-level cache is read from there, several times as fast as from
# memory, and a training step's tensors do not fit.

TIMES_CACHE = 4
"""A tensor this many times the size of the cache is mostly read from memory."""
MEMORY_PER_TENSOR = 256
"""If the cache size is not reported, or only that of the first levels, a tensor is this fraction of
the memory. The largest unreported cache (the MI300X's Infinity Cache) is 1/750 of its device's
memory."""
MOST_OF_MEMORY = 128
"""About fifteen tensors are held at once, and they must not fill a device."""


@dataclass(frozen=True)
class ProbeSizes:
    """Sizes to measure, in ascending order."""

    sides: tuple[int, ...]
    """Side lengths of square matrix products."""
    rows: int
    """Rows of the fp32 tensor whose reading and writing is timed."""
    columns: int
    attention: tuple[int, int, int, int]
    """batch, heads, length, width"""
    messages: tuple[int, ...]
    """Bytes of a collective's full tensor."""

    @property
    def tensor_bytes(self) -> int:
        """Bytes of the tensor whose reading and writing is timed."""
        return 4 * self.rows * self.columns


HOST = ProbeSizes(
    sides=(64, 128, 256, 512, 1024),
    rows=4096,
    columns=512,
    attention=(4, 4, 256, 64),
    messages=(1 << 12, 1 << 16, 1 << 20, 1 << 23),
)
"""Small, because a host is slow; the tensors held at once are larger than its cache."""


def accelerator_sizes(memory_bytes: int, cache_bytes: int | None) -> ProbeSizes:
    """Return the sizes for a device with this memory and last-level cache (None: not reported)."""
    wanted = max(TIMES_CACHE * (cache_bytes or 0), memory_bytes // MEMORY_PER_TENSOR)
    tensor_bytes = min(wanted, memory_bytes // MOST_OF_MEMORY)
    columns = 4096
    side = 1024
    while 3 * 2 * side**2 < tensor_bytes:  # two factors and a product, in 16 bit
        side *= 2
    return ProbeSizes(
        sides=tuple(side >> shift for shift in range(5, -1, -1)),
        rows=-(-tensor_bytes // (4 * columns)),
        columns=columns,
        attention=(8, 16, 2048, 64),
        messages=(1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 28),
    )


PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
SECONDS_EACH = 0.25


def sizes_for(device: torch.device) -> ProbeSizes:
    """Return the sizes for a device, from the properties that it reports."""
    accelerator = accelerator_of(device)
    if accelerator.is_cpu or accelerator.memory_bytes is None:
        return HOST
    return accelerator_sizes(accelerator.memory_bytes, accelerator.cache_bytes)


def measure_device(device: torch.device, sizes: ProbeSizes) -> dict[str, Any]:
    """Measure products by precision and size, memory bandwidth, and the overhead per operation."""
    found: dict[str, Any] = {"products": {}}
    for name, dtype in PRECISIONS.items():
        rates = {}
        for side in sizes.sides:
            a = torch.randn(side, side, device=device).to(dtype)
            b = torch.randn(side, side, device=device).to(dtype)
            rates[side] = 2.0 * side**3 / _seconds(partial(torch.mm, a, b), device)
        found["products"][name] = rates
    large = torch.randn(sizes.rows, sizes.columns, device=device)
    moved = 2 * _KEPT * large.numel() * large.element_size()
    found["memory_bytes_per_s"] = moved / _seconds(_keeping(lambda: large * 2.0), device)
    curves = (
        F.gelu,
        partial(F.log_softmax, dim=-1),
        partial(F.layer_norm, normalized_shape=(sizes.columns,)),
    )
    seconds = sum(_seconds(_keeping(partial(curve, large)), device) for curve in curves)
    found["curved_bytes_per_s"] = len(curves) * moved / seconds
    found["attention_flops"] = {
        name: _attention(dtype, device, sizes.attention) for name, dtype in PRECISIONS.items()
    }
    small = torch.randn(8, device=device, requires_grad=True)
    found["operation_s"] = _seconds(partial(_chain, small), device) / (2 * _CHAINED)
    return found


_KEPT, _CHAINED = 12, 32


def _keeping(call: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function that keeps several results alive, as a model does for backward.

    On a host, allocating new memory takes a considerable part of an operation's time.
    """
    return lambda: [call() for _ in range(_KEPT)]


def _chain(small: torch.Tensor) -> None:
    """Run operations with almost no work, forward and backward."""
    out = small
    for _ in range(_CHAINED):
        out = out + 1.0
    out.sum().backward()


def _attention(dtype: torch.dtype, device: torch.device, shape: tuple[int, int, int, int]) -> float:
    """Return the operations per second of fused attention, forward and backward."""
    batch, heads, length, width = shape
    q, k, v = (torch.randn(shape, device=device).to(dtype).requires_grad_() for _ in range(3))

    def both_ways() -> None:
        F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()

    # two products forward and five backward; causal ones count in full, as in the planner
    flops = 7 * 2.0 * batch * heads * length * length * width
    return flops / _seconds(both_ways, device)


def measure_exchange(device: torch.device, messages: Sequence[int]) -> dict[str, Any]:
    """Return seconds per collective by size of the full tensor, inside and between nodes."""
    node_of = nodes_of_ranks()
    sets = rank_sets(node_of, {})
    asked = CollectivesRequest(PLANNED, tuple(messages), is_thorough=False)
    where = sets if len(sets) == 1 else sets[1:]  # with several nodes of several ranks: not both
    return exchange_of(measure_all(asked, where, device), len(set(node_of)))


def measure_overheads(exchange: Mapping[str, Any]) -> dict[str, float]:
    """Measure the overhead of tp per product and of fsdp per block, with almost no work or data."""
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    ranks, host = dist.get_world_size(), torch.device("cpu")
    mesh = init_device_mesh("cpu", (ranks,))
    found = exchange.get("between", exchange.get("inside", {}))["seconds"]
    latency = {kind: times[min(times)] for kind, times in found.items()}
    width = 8 * ranks
    inputs = torch.randn(4, width)

    def two_layers() -> nn.Sequential:
        return nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))

    def once(model: nn.Module) -> float:
        return _seconds(lambda: model(inputs).sum().backward(), host)

    plain = once(two_layers())
    cut = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    shared = once(parallelize_module(two_layers(), mesh, cut))
    # one all-reduce: the input needs no gradient here; six products less the input's own
    per_product = (shared - plain - latency["all_reduce"]) / 5
    model = two_layers()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    sharded = once(model)
    sent = 2 * latency["all_gather"] + latency["reduce_scatter"]
    return {"tp": max(0.0, per_product), "fsdp": max(0.0, (sharded - plain) / 2 - sent)}


def measure_storage(folder: Path, num_bytes: int = 1 << 26) -> float:
    """Return the bytes written and flushed per second."""
    block = os.urandom(1 << 20)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        began = time.perf_counter()
        for _ in range(num_bytes >> 20):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return num_bytes / (time.perf_counter() - began)


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Return the median of as many calls as fit into a quarter of a second, equal on all ranks."""
    call()
    accelerator_of(device).synchronize()
    began = time.perf_counter()
    call()
    accelerator_of(device).synchronize()
    once = max(time.perf_counter() - began, 1e-7)
    rounds = torch.tensor([min(200.0, max(3.0, SECONDS_EACH / once))])
    if dist.is_initialized():
        dist.all_reduce(rounds, op=dist.ReduceOp.MIN)
    inner = max(1, int(2e-4 / once)) if once < 1e-4 and not dist.is_initialized() else 1
    times = []
    for _ in range(int(rounds)):
        began = time.perf_counter()
        for _ in range(inner):
            call()
        accelerator_of(device).synchronize()
        times.append((time.perf_counter() - began) / inner)
    return median(times)


def main() -> None:
    """Measure on this rank; rank 0 writes its results."""
    output, folder = Path(sys.argv[1]), Path(sys.argv[2])
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = use_device_of(local)
    accelerator = accelerator_of(device)
    if ranks > 1:
        dist.init_process_group(accelerator.backend)
    sizes = sizes_for(device)
    found = measure_device(device, sizes)
    found["exchange"] = measure_exchange(device, sizes.messages) if ranks > 1 else {}
    found["exchange_overheads"] = {"tp": 0.0, "fsdp": 0.0}
    if (
        ranks > 1 and accelerator.is_cpu
    ):  # an accelerator keeps working while its host prepares the next operations
        found["exchange_overheads"] = measure_overheads(found["exchange"])
    found["storage_bytes_per_s"] = measure_storage(folder) if rank == 0 else 0.0
    found["ranks"] = ranks
    found["ranks_per_node"] = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    found["device"] = "cpu" if accelerator.is_cpu else accelerator.name
    if not accelerator.is_cpu:
        found["memory_bytes"] = accelerator.memory_bytes
    if rank == 0:
        output.write_text(json.dumps(found, indent=1) + "\n")
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

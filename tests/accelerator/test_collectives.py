"""Collectives of the device's own group: exact, and timed by the device's clock."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from drivetrain.collectives import measure
from drivetrain.collectives.request import OPERATIONS, CollectivesRequest, rank_sets
from drivetrain.parallel.accelerator import accelerator_of, use_device_of
from drivetrain.testing import run_ranks
from tests.accelerator.layouts import GROUPS

ON_DEVICE_S = 0.05


def every_operation() -> tuple[dict[str, int], float, float]:
    """Wrong elements by row; an all-reduce's time on the device, and to ask for it."""
    ranks = rank_sets([0] * dist.get_world_size(), {})[0]
    member = measure.join(ranks, use_device_of(dist.get_rank()))
    asked = CollectivesRequest(OPERATIONS, (512, 1 << 14), calls=3)
    rows = measure.measure(asked, ranks, member)
    wrong = {f"{row.operation} {row.num_bytes}": row.wrong for row in rows}
    torch.get_device_module("sim").set_collective_cost(ON_DEVICE_S)
    tensor = member.empty(64, "float")
    on_host = []

    def call() -> None:
        began = time.perf_counter()
        dist.all_reduce(tensor)
        on_host.append(time.perf_counter() - began)

    on_device = measure.timed(call, 3, accelerator_of(member.device))
    return wrong, min(on_device), min(on_host)


def test_nothing_is_wrong_and_the_devices_clock_counts() -> None:
    wrong, on_device, on_host = run_ranks(every_operation, 2, 300, (), GROUPS["both"])[0]
    assert len(wrong) == 2 * (len(OPERATIONS) - 1) + 1
    assert not any(wrong.values()), wrong
    assert on_host < ON_DEVICE_S / 2, "the call returned before the device was done"
    assert on_device >= 0.9 * ON_DEVICE_S

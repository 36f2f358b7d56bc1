"""The device itself: strict where CUDA is strict, and as late."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from drivetrain.testing import run_ranks

sim = torch.get_device_module("sim")
DEVICE = torch.device("sim", 3)


@pytest.fixture(autouse=True)
def _on_device() -> None:
    sim.set_device(DEVICE)


def test_torch_knows_it_as_the_accelerator() -> None:
    assert torch.accelerator.current_accelerator() == torch.device("sim")
    assert torch.accelerator.device_count() == 8
    assert torch.ones(1, device="sim").device == DEVICE


def test_devices_and_the_host_do_not_mix() -> None:
    here = torch.ones(2, device=DEVICE)
    with pytest.raises(RuntimeError, match="at least two devices"):
        here + torch.ones(2)
    with pytest.raises(RuntimeError, match="at least two devices"):
        here + torch.ones(2, device="sim:1")
    with pytest.raises(TypeError, match="numpy"):
        here.numpy()
    assert (here * torch.tensor(3.0)).tolist() == [3.0, 3.0]  # a single number may


def test_fresh_memory_is_poison() -> None:
    assert torch.empty(3, device=DEVICE).isnan().all()


def test_the_host_runs_ahead_and_events_tell_the_truth() -> None:
    sim.set_op_cost(0.01)
    start, end = (torch.Event(DEVICE, enable_timing=True) for _ in range(2))
    value = torch.zeros(4, device=DEVICE)
    torch.accelerator.synchronize()
    began = time.perf_counter()
    start.record()
    for _ in range(50):
        value.add_(1)
    end.record()
    assert not end.query()
    with pytest.raises(RuntimeError, match="must be completed"):
        start.elapsed_time(end)
    asked_ms = 1000 * (time.perf_counter() - began)
    assert value[0].item() == 50
    assert time.perf_counter() - began >= 0.5
    # the device waits for a host that is late, and for nothing else
    assert 500 - 1e-6 <= start.elapsed_time(end) <= 500 + asked_ms


def test_streams_run_side_by_side() -> None:
    sim.set_op_cost(0.2)
    side = torch.Stream(DEVICE)
    value, other = torch.zeros(1, device=DEVICE), torch.zeros(1, device=DEVICE)
    torch.accelerator.synchronize()
    sim.keep_intervals(True)
    value.add_(1)
    with side:
        other.add_(1)
    torch.accelerator.current_stream().wait_stream(side)
    value.add_(1)
    first, beside, after = sim.take_intervals()
    sim.keep_intervals(False)
    assert first.stream != beside.stream
    assert beside.start_s < first.end_s
    assert after.start_s >= beside.end_s


def test_a_late_copy_reads_its_source_late() -> None:
    source = torch.ones(3).pin_memory()
    there = source.to(DEVICE, non_blocking=True)
    source.fill_(7)  # too early
    assert (there + 0).tolist() == [7, 7, 7]


def test_pageable_memory_is_read_at_once() -> None:
    source = torch.ones(3)
    there = source.to(DEVICE, non_blocking=True)
    source.fill_(7)
    assert (there + 0).tolist() == [1, 1, 1]


def test_a_late_copy_to_the_host_is_poison_until_someone_synchronises() -> None:
    there = torch.ones(3, device=DEVICE)
    here = torch.empty(3, pin_memory=True)
    here.copy_(there, non_blocking=True)
    assert here.isnan().all()
    there.fill_(2)  # after the copy, on its stream
    torch.accelerator.synchronize()
    assert here.tolist() == [1, 1, 1]


def test_a_copy_on_a_stream_nobody_waits_for_reads_what_comes_later() -> None:
    there, here, side = torch.ones(3, device=DEVICE), torch.empty(3, pin_memory=True), sim.Stream()
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        here.copy_(there, non_blocking=True)
        copied = side.record_event()
    there.fill_(2)  # a race
    copied.synchronize()
    assert here.tolist() == [2, 2, 2]
    with side:
        here.copy_(there, non_blocking=True)
        copied = side.record_event()
    torch.accelerator.current_stream().wait_event(copied)
    there.fill_(3)
    copied.synchronize()
    assert here.tolist() == [2, 2, 2]


def test_synchronisations_are_counted_where_they_are_caused() -> None:
    value = torch.ones(2, device=DEVICE)
    before = sim.num_synchronizations()
    with sim.watching_synchronizations() as seen:
        value.mul_(2).sum()
        value.to("cpu", non_blocking=True)
        assert not seen
        value[0].item()
        value.cpu()
        torch.ones(2).to(DEVICE)
        value.nonzero()
        torch.tensor(1.0, device=DEVICE)
    assert sim.num_synchronizations() - before == len(seen) == 5
    assert [s.cause for s in seen] == [
        "item()",
        "copy to the host",
        "copy from the host",
        "aten::nonzero",
        "copy from the host",
    ]
    assert all("test_device.py:" in s.where for s in seen)


def test_its_generator_is_its_own() -> None:
    torch.manual_seed(5)
    there = torch.rand(4, device=DEVICE), nn.functional.dropout(torch.ones(9, device=DEVICE))
    torch.manual_seed(5)
    assert torch.equal(there[0].cpu(), torch.rand(4))
    assert torch.equal(there[1].cpu(), nn.functional.dropout(torch.ones(9)))
    state, host = sim.get_rng_state(DEVICE), torch.get_rng_state()
    first = torch.randn(3, device=DEVICE)
    assert torch.equal(host, torch.get_rng_state())
    sim.set_rng_state(state, DEVICE)
    assert torch.equal(first, torch.randn(3, device=DEVICE))


def test_autocast_lowers_what_torch_lowers() -> None:
    layer, norm = nn.Linear(4, 4, device=DEVICE), nn.LayerNorm(4, device=DEVICE)
    with torch.autocast("sim", dtype=torch.bfloat16):
        lowered = layer(torch.ones(2, 4, device=DEVICE))
        assert lowered.dtype is torch.bfloat16
        assert norm(lowered).dtype is torch.float32


def test_memory_is_metered_per_device() -> None:
    before, other = sim.memory_allocated(DEVICE), sim.memory_allocated(1)
    sim.reset_peak_memory_stats(DEVICE)
    kept = torch.empty(1000, device=DEVICE)
    torch.empty(2000, device=DEVICE)
    assert sim.memory_allocated(DEVICE) - before == kept.nbytes
    assert sim.max_memory_allocated(DEVICE) - before == kept.nbytes + 8000
    assert sim.memory_allocated(1) == other
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 35, dtype=torch.uint8, device=DEVICE)


def test_data_is_set_from_the_host() -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.data = parameter.data.to(DEVICE)
    assert parameter.device == DEVICE
    layer = nn.Linear(2, 2)
    weight = layer.weight
    assert layer.to(DEVICE).weight is weight


def test_a_forked_child_cannot_use_what_its_parent_has_initialised() -> None:
    torch.ones(1, device=DEVICE)
    child = os.fork()
    if child == 0:
        try:
            torch.ones(1, device=DEVICE)
        except RuntimeError as error:
            os._exit(0 if "forked subprocess" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _collectives(index_shift: int) -> dict[str, object]:
    rank = dist.get_rank()
    device = torch.device("sim", rank + index_shift)
    sim.set_device(device)
    with pytest.raises(RuntimeError, match="must be on the device|No backend type"):
        dist.all_reduce(torch.ones(1))
    late = torch.full((2,), float(rank), device=device)
    work = dist.all_reduce(late, async_op=True)
    is_poison = bool(torch.isnan(late).all())
    work.wait()
    gathered = torch.empty(4, device=device)
    dist.all_gather_into_tensor(gathered, torch.full((2,), float(rank), device=device))
    scattered = torch.empty(2, device=device)
    dist.reduce_scatter_tensor(scattered, torch.arange(4.0, device=device))
    if rank == 0:
        dist.send(torch.full((3,), 5.0, device=device), 1)
        received = torch.zeros(3, device=device)
    else:
        received = torch.empty(3, device=device)
        dist.recv(received, 0)
    # the group ends together, when the slowest of its members is there
    sim.set_op_cost(0.02)
    if rank == 1:
        late.add_(0).add_(0)
    sim.reset_costs()
    sim.set_collective_cost(0.01)
    before = time.monotonic()
    dist.all_reduce(late)
    torch.accelerator.synchronize()
    return {
        "is_poison": is_poison,
        "late": late.tolist(),
        "gathered": gathered.tolist(),
        "scattered": scattered.tolist(),
        "received": received.tolist(),
        "waited_s": time.monotonic() - before,
    }


@pytest.mark.parametrize("index_shift", [0, 4])
def test_collectives_are_strict_and_late(index_shift: int) -> None:
    first, second = run_ranks(_collectives, 2, args=(index_shift,), backend="sim:simccl")
    assert first["is_poison"]
    assert first["late"] == [2, 2]
    assert first["gathered"] == [0, 0, 1, 1]
    assert (first["scattered"], second["scattered"]) == ([0, 2], [4, 6])
    assert second["received"] == [5, 5, 5]
    assert 0.04 < float(str(first["waited_s"])) < 0.5

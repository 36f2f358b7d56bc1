"""What a rank tells of its collectives: from torch's shared flight recorder, and from NCCL's."""

from __future__ import annotations

import pickle
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from drivetrain.diagnose import hang
from drivetrain.diagnose.collectives import parse_calls
from drivetrain.diagnose.evidence import Evidence
from drivetrain.launch.early import variables_of_ranks
from drivetrain.supervise.failures.dump_responder import RecordedGroup, describe, latest_collectives
from drivetrain.testing import run_ranks


def _dump() -> dict[str, Any]:
    """All calls retired: gloo's thread does that a moment after the call has returned."""
    from torch._C import _distributed_c10d

    deadline_s = time.monotonic() + 10
    while True:
        dump = _distributed_c10d._dump_fr_trace()  # type: ignore[attr-defined]
        trace: dict[str, Any] = pickle.loads(dump)  # noqa: S301 - our own process made it
        if all(entry["retired"] for entry in trace["entries"]):
            return trace
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def _as_nccls(dump: dict[str, Any], num_done: int) -> dict[str, Any]:
    """A real dump, changed to what NCCL's recorder makes of the same calls.

    NCCL needs a driver, so this was not recorded on a GPU: it follows FlightRecorder.hpp of torch
    2.15, where both recorders are one template. NCCL's has the device's events, so it knows the
    state, and one that it retires without having seen it complete has timed out.
    """
    entries = []
    for number, entry in enumerate(dump["entries"]):
        is_done = number < num_done
        at_ns = entry["time_created_ns"]
        entries.append(
            {
                **entry,
                "profiling_name": entry["profiling_name"].replace("gloo:", "nccl:"),
                "state": "completed" if is_done else "started",
                "retired": True,
                "time_discovered_started_ns": at_ns + 1000,
                "time_discovered_completed_ns": at_ns + 2000 if is_done else None,
            }
        )
    return {**dump, "comm_lib_version": "2.30.7", "nccl_comm_state": {}, "entries": entries}


def _tell() -> tuple[dict[str, Any], dict[str, Any]]:
    """One rank's answer without and with NCCL's symbol, which builds without CUDA do not have."""
    from torch._C import _distributed_c10d

    dist.all_reduce(torch.ones(3))
    dist.all_gather([torch.zeros(2)] * dist.get_world_size(), torch.ones(2))
    dump = _dump()
    without = latest_collectives()
    nccls = pickle.dumps(_as_nccls(dump, num_done=1))
    _distributed_c10d._dump_nccl_trace = lambda: nccls  # type: ignore[attr-defined]
    with_nccl = latest_collectives()
    assert without is not None
    assert with_nccl is not None
    return without, with_nccl


def test_both_recorders_are_read_and_each_backend_has_its_own_numbers() -> None:
    for without, with_nccl in run_ranks(_tell, 2):
        assert without["groups"] == {"default_pg (0)": [0, 1]}
        assert [(c["op"], c["number"], c["is_done"]) for c in without["calls"]] == [
            ("all_reduce", 1, True),
            ("all_gather", 2, True),
        ]
        told = [(c["group"], c["op"], c["number"], c["is_done"]) for c in with_nccl["calls"]]
        assert told == [
            ("default_pg (0)", "all_reduce", 1, True),
            ("default_pg (0), nccl", "all_reduce", 1, True),
            ("default_pg (0)", "all_gather", 2, True),
            ("default_pg (0), nccl", "all_gather", 2, False),  # retired, but it has timed out
        ]
        assert with_nccl["groups"] == {"default_pg (0)": [0, 1], "default_pg (0), nccl": [0, 1]}
        sites = [with_nccl["sites"][call["site"]] for call in with_nccl["calls"]]
        assert all(site[0][0] == __file__ for site in sites)


def _trace() -> dict[str, Any]:
    for size in (3, 4, 5):
        dist.all_reduce(torch.ones(size))
    return _dump()


def test_a_hang_over_nccl_is_told_from_the_same_groups_calls_over_gloo() -> None:
    """Rank 1 has called more over gloo than rank 0 and never came to NCCL's third."""
    traces = run_ranks(_trace, 2)
    group = RecordedGroup("0", "default_pg", (0, 1), ("gloo", "nccl"))
    ahead, behind = traces
    missing = {**behind, "entries": behind["entries"][:2]}
    fewer = {**ahead, "entries": ahead["entries"][:1]}
    answers = [
        describe({"_dump_fr_trace": fewer, "_dump_nccl_trace": _as_nccls(ahead, 2)}, [group]),
        describe({"_dump_fr_trace": behind, "_dump_nccl_trace": _as_nccls(missing, 2)}, [group]),
    ]
    calls = {rank: parse_calls(told) for rank, told in enumerate(answers)}
    finding = hang.judge(Evidence(1, end={"kind": "stalled", "step": 4}, calls=calls))
    assert finding is not None
    assert finding.ranks == (1,)
    assert "never reached the all_reduce of shape [5]" in finding.what
    assert "rank 0 waits in" in finding.what


def test_a_rank_that_has_called_nothing_over_a_backend_is_missing_there() -> None:
    group = RecordedGroup("0", "default_pg", (0, 1), ("gloo", "nccl"))
    told = describe({}, [group])
    assert told["groups"] == {"default_pg (0), gloo": [0, 1], "default_pg (0), nccl": [0, 1]}


def test_the_launcher_switches_both_recorders_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the name that both read (FlightRecorder.hpp); of the old one torch warns on every rank."""
    name, old_name = "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"
    for each in (name, old_name):
        monkeypatch.delenv(each, raising=False)
    wanted = variables_of_ranks(None, 2)
    assert wanted[name] == "512"
    assert old_name not in wanted
    monkeypatch.setenv(old_name, "0")  # the user's own choice, which the new name would overrule
    assert name not in variables_of_ranks(None, 2)

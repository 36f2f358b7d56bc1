"""Verdicts from given evidence: no process is started here."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drivetrain.core.errors import ConfigError
from drivetrain.diagnose import crash, divergence, hang, slow, straggler
from drivetrain.diagnose.collectives import Call, Calls
from drivetrain.diagnose.evidence import Evidence
from drivetrain.diagnose.finding import Finding, Kind, Severity, by_severity, listed
from drivetrain.diagnose.run import diagnose, with_recovery
from drivetrain.diagnose.stacks import Frame, Stacks, Thread, parse_stacks, traceback_line
from drivetrain.diagnose.trace import summarize
from drivetrain.record.reading import PastAttempt

USERS = Frame("/home/ada/train.py", 31, "loss")
OTHER_LINE = Frame("/home/ada/train.py", 44, "loss")
TORCHS = Frame("/env/lib/python3.11/site-packages/torch/distributed/c10d.py", 9, "all_reduce")
OURS = Frame("/work/src/drivetrain/train/loop.py", 103, "_go_through")
STALLED = {"kind": "stalled", "step": 12, "host": "h1", "detail": "rank 0: no progress"}


def stacks_at(*frames: Frame) -> Stacks:
    return Stacks((Thread(frames, is_current=True),))


def calls(*ops: str, pending: bool = False, sizes: tuple[int, ...] = (7,)) -> Calls:
    last = len(ops) - 1
    return Calls(
        tuple(
            Call("default", n, op, (sizes,), is_done=not (pending and n == last), frames=(USERS,))
            for n, op in enumerate(ops)
        ),
        {"default": (0, 1, 2)},
    )


@pytest.mark.parametrize("room", ["train", "strategies/ddp", "compat", "parallel"])
def test_a_line_of_ours_is_not_the_users_in_a_checkout_either(room: str) -> None:
    ours = Frame(f"/home/ada/drivetrain/src/drivetrain/{room}/strategy.py", 203, "backward")
    assert stacks_at(TORCHS, ours, USERS).threads[0].user_frame == USERS


def test_a_stack_is_read_with_its_threads_and_the_processes_of_the_rank() -> None:
    text = (
        "Thread 0x01 (most recent call first):\n"
        '  File "/usr/lib/python3.11/threading.py", line 1 in wait\n\n'
        "Current thread 0x02 (most recent call first):\n"
        '  File "/env/site-packages/torch/x.py", line 5 in f\n'
        '  File "/home/ada/train.py", line 31 in loss\n'
        "process 812:\n"
        "Current thread 0x03 (most recent call first):\n"
        '  File "/home/ada/data.py", line 7 in __getitem__\n'
    )
    stacks = parse_stacks(text)
    assert stacks is not None
    assert stacks.main is not None
    assert str(stacks.main.user_frame) == "train.py:31 in loss"
    assert [pid for pid, _ in stacks.children] == [812]
    assert parse_stacks("no answer; the process may be stopped\n") is None


def test_of_a_traceback_the_users_innermost_line_counts() -> None:
    text = (
        "Traceback (most recent call last):\n"
        '  File "/home/ada/train.py", line 90, in main\n'
        '  File "/home/ada/train.py", line 31, in loss\n'
        '  File "/env/site-packages/torch/nn/functional.py", line 5, in embedding\n'
        "IndexError: index out of range\n"
    )
    assert str(traceback_line(text)) == "train.py:31 in loss"


def test_the_rank_that_never_came_is_named_with_its_line() -> None:
    evidence = Evidence(
        1,
        end=STALLED,
        stacks={0: stacks_at(TORCHS, USERS), 1: stacks_at(OTHER_LINE, OURS)},
        calls={0: calls("all_reduce", "all_reduce", pending=True), 1: calls("all_reduce")},
    )
    finding = hang.judge(evidence)
    assert finding is not None
    assert (finding.kind, finding.ranks, finding.line) == (Kind.HANG, (1,), "train.py:44 in loss")
    assert "rank 1 (h1) never reached the all_reduce of shape [7]" in finding.what


def test_of_three_ranks_the_one_that_calls_something_else_is_the_odd_one() -> None:
    evidence = Evidence(
        1,
        end=STALLED,
        calls={
            0: calls("all_reduce", "all_reduce", pending=True),
            1: calls("all_reduce", "barrier", pending=True),
            2: calls("all_reduce", "all_reduce", pending=True),
        },
    )
    finding = hang.judge(evidence)
    assert finding is not None
    assert (finding.kind, finding.ranks) == (Kind.MISMATCH, (1,))


@pytest.mark.parametrize("odd", [0, 1])
def test_of_two_ranks_the_one_that_broke_the_order_so_far_is_the_odd_one(odd: int) -> None:
    usual = ("all_gather", "all_reduce") * 4
    evidence = Evidence(
        1,
        end=STALLED,
        calls={
            odd: calls(*usual, "all_reduce", pending=True),
            1 - odd: calls(*usual, "all_gather", pending=True),
        },
    )
    finding = hang.judge(evidence)
    assert finding is not None
    assert (finding.kind, finding.ranks) == (Kind.MISMATCH, (odd,))


@pytest.mark.parametrize("odd", [0, 1])
def test_a_rare_call_just_before_does_not_hide_who_broke_the_order(odd: int) -> None:
    usual = (*("all_gather", "all_reduce") * 4, "barrier")  # as logging does now and then
    evidence = Evidence(
        1,
        end=STALLED,
        calls={
            odd: calls(*usual, "all_reduce", pending=True),
            1 - odd: calls(*usual, "all_gather", pending=True),
        },
    )
    finding = hang.judge(evidence)
    assert finding is not None
    assert finding.ranks == (odd,)


def test_a_rank_that_gloo_aborted_is_told_by_its_stack_and_the_others_calls() -> None:
    usual = ("all_gather", "all_reduce") * 4
    end = {"kind": "failed", "step": 5, "failures": [failure(1, -6)], "exits": {"1": -6}}
    others = calls(*usual, "all_gather", pending=True)
    sites = {"all_gather": USERS, "all_reduce": OTHER_LINE}
    told = Calls(tuple(replace(c, frames=(sites[c.op],)) for c in others.calls), others.groups)
    at = {1: stacks_at(TORCHS, OTHER_LINE)}  # in the all_reduce, where an all_gather was due
    finding = crash.judge(Evidence(1, end=end, stacks=at, calls={0: told}))
    assert finding is not None
    assert (finding.kind, finding.ranks) == (Kind.MISMATCH, (1,))
    assert "called all_reduce of shape [7] at train.py:44 in loss where rank 0" in finding.what


@pytest.mark.parametrize(
    ("others_line", "remedies"),
    [
        (USERS, ["look for an `if`"]),  # two lines: two collectives, and padding would mix them
        (OTHER_LINE, ["the same shape"]),
        (None, ["look for an `if`", "the same shape"]),
    ],
)
def test_an_aborted_rank_that_called_something_new_is_told_with_both_lines(
    others_line: Frame | None, remedies: list[str]
) -> None:
    end = {"kind": "failed", "step": 3, "failures": [failure(0, -6)], "exits": {"0": -6}}
    wide = calls("broadcast", "all_reduce", pending=True, sizes=(82,))
    frames = (others_line,) if others_line else ()
    told = Calls((wide.calls[0], replace(wide.calls[1], frames=frames)), wide.groups)
    at = {0: stacks_at(TORCHS, OTHER_LINE)}
    finding = crash.judge(Evidence(1, end=end, stacks=at, calls={1: told}))
    assert finding is not None
    assert (finding.kind, finding.line) == (Kind.MISMATCH, "train.py:44 in loss")
    theirs = f" at {others_line}" if others_line else ""
    assert finding.what == (
        "rank 0 called all_reduce at train.py:44 in loss where rank 1 called all_reduce of "
        f"shape [82]{theirs}: the sizes of their tensors differ"
    )
    said = [each for each in ("look for an `if`", "the same shape") if each in finding.remedy]
    assert sorted(said, key=finding.remedy.index) == remedies


def test_calls_of_two_sizes_without_lines_are_first_taken_for_two_collectives() -> None:
    def waits_with(size: int) -> Calls:
        return Calls(
            (Call("default", 5, "all_reduce", ((size,),), is_done=False),), {"default": (0, 1)}
        )

    finding = hang.judge(Evidence(1, end=STALLED, calls={0: waits_with(1), 1: waits_with(82)}))
    assert finding is not None
    assert finding.remedy.index("look for an `if`") < finding.remedy.index("the same shape")


def test_ranks_that_wait_for_each_other_in_two_groups_are_both_named() -> None:
    groups = {"tp": (0, 1), "dp": (0, 1)}

    def waits_in(group: str) -> Calls:
        return Calls((Call(group, 5, "all_reduce", ((7,),), is_done=False),), groups)

    finding = hang.judge(
        Evidence(
            1,
            end=STALLED,
            stacks={1: stacks_at(TORCHS, OTHER_LINE)},  # the call's own record has no line
            calls={0: waits_in("dp"), 1: waits_in("tp")},
        )
    )
    assert finding is not None
    assert (finding.kind, finding.ranks) == (Kind.MISMATCH, (0, 1))
    assert "each waits for the other" in finding.what
    assert "at train.py:44 in loss of tp" in finding.what
    assert "look for an `if` on the rank" in finding.remedy


def test_without_collectives_the_rank_outside_of_one_is_the_one() -> None:
    evidence = Evidence(
        1, end=STALLED, stacks={0: stacks_at(TORCHS, USERS), 1: stacks_at(OTHER_LINE, OURS)}
    )
    finding = hang.judge(evidence)
    assert finding is not None
    assert (finding.ranks, finding.line) == ((1,), "train.py:44 in loss")


def test_a_rank_that_does_not_answer_is_said_to_be_stopped() -> None:
    finding = hang.judge(Evidence(1, end=STALLED, stacks={0: stacks_at(TORCHS), 1: None}))
    assert finding is not None
    assert finding.ranks == (1,)
    assert "does not answer" in finding.what


def failure(rank: int, code: int, error: str = "", *, collateral: bool = False) -> dict[str, Any]:
    return {"rank": rank, "exit_code": code, "error": error, "is_collateral": collateral}


def test_a_rank_that_left_with_exit_code_0_is_found_behind_the_others_complaints() -> None:
    noticed = failure(0, 1, "RuntimeError: Connection closed by peer", collateral=True)
    end = {"kind": "failed", "step": 5, "host": "h1", "failures": [noticed], "exits": {"1": 0}}
    finding = crash.judge(Evidence(1, end=end))
    assert finding is not None
    assert (finding.kind, finding.ranks) == (Kind.LEFT_EARLY, (1,))


def test_a_kill_at_the_memory_limit_is_out_of_memory_and_one_below_it_is_not() -> None:
    def judged(held: int, on_host: int = 0) -> Finding | None:
        facts = {"oom_kills": 0, "host_oom_kills": on_host}
        memory = {"1": {"held_bytes": held, "limit_bytes": 1000, **facts}}
        end = {"kind": "failed", "step": 5, "failures": [failure(1, -9)], "resources": memory}
        return crash.judge(Evidence(1, end=end))

    full, half = judged(980), judged(500)
    assert full is not None
    assert half is not None
    assert (full.kind, half.kind) == (Kind.OUT_OF_MEMORY, Kind.CRASH)
    grown = judged(500, on_host=1)
    assert grown is not None
    assert grown.kind is Kind.OUT_OF_MEMORY
    assert "when last seen" in grown.what


def test_memory_that_runs_out_before_an_attempt_is_open_is_not_the_micro_batches() -> None:
    memory = {"1": {"held_bytes": 980, "limit_bytes": 1000}}
    end = {"kind": "failed while starting", "failures": [failure(1, -9)], "resources": memory}
    starting, begun = crash.judge(Evidence(1, end=end)), crash.judge(Evidence(1, {"x": 1}, end))
    assert starting is not None
    assert begun is not None
    assert "micro_batch_size" in begun.remedy
    assert starting.remedy == (
        "load less in each rank, run fewer ranks per node, or give the job more memory"
    )


def test_a_host_that_is_the_first_to_fail_again_and_again_is_named() -> None:
    def failed(attempt: int, rank: int) -> Evidence:
        hosts = {"0": "h1", "1": "h2"}
        end = {"kind": "failed", "step": 5, "failures": [failure(rank, -9)], "hosts": hosts}
        return Evidence(attempt, end=end)

    again = crash.failing_nodes([failed(1, 1), failed(2, 1), failed(3, 1)])
    assert [finding.host for finding in again] == ["h2"]
    assert not crash.failing_nodes([failed(1, 1), failed(2, 0), failed(3, 1)])


def test_a_spike_is_found_and_a_noisy_loss_is_not() -> None:
    noise = np.random.default_rng(3).normal(0, 0.1, 200)
    losses = [(step, 2.0 + float(noise[step])) for step in range(200)]
    assert divergence.loss_spikes(losses, []) is None
    spike = divergence.loss_spikes([*losses[:150], (150, 7.0), *losses[151:]], [])
    assert spike is not None
    assert spike.step == 150


def own_times(slow: int | None, excess: float, seed: int = 0) -> np.ndarray[Any, Any]:
    """Four ranks, 160 steps of 50 ms with 2 % of noise; one is slower from step 50 on."""
    times = np.random.default_rng(seed).normal(0.05, 0.001, (4, 160))
    if slow is not None:
        times[slow, 50:] *= 1 + excess
    return times


@pytest.mark.filterwarnings("error")
def test_one_rank_alone_is_slower_than_nobody() -> None:
    times = np.ones((1, 160))
    assert not straggler.find_lags(times, times, times, np.arange(1.0, 161))


@pytest.mark.parametrize("excess", [0.1, 0.2, 0.5])
def test_a_slow_rank_is_found_within_ten_steps(excess: float) -> None:
    times = own_times(2, excess)
    slow = straggler.slow_windows(times)
    assert [int(rank) for rank in np.flatnonzero(slow.any(axis=1))] == [2]
    first_end = int(np.flatnonzero(slow[2])[0]) + straggler.WINDOW - 1
    assert first_end < 60
    lags = straggler.find_lags(times, np.zeros_like(times), times + 0.01, np.arange(1.0, 161))
    assert [lag.rank for lag in lags] == [2]
    assert lags[0].excess == pytest.approx(excess, abs=0.02)
    assert not lags[0].data_share


def test_a_rank_that_became_slow_late_counts_and_one_that_was_so_for_a_moment_does_not() -> None:
    times = np.random.default_rng(5).normal(0.05, 0.001, (4, 1000))
    late, passing = times.copy(), times.copy()
    late[1, 880:] *= 1.2
    passing[1, 500:540] *= 1.2

    def found(own_s: straggler.Array) -> list[straggler.Lag]:
        steps = np.arange(1.0, 1001)
        return straggler.find_lags(own_s, np.zeros_like(own_s), own_s + 0.01, steps)

    assert [(lag.rank, lag.is_persistent, lag.steps[1]) for lag in found(late)] == [(1, True, 1000)]
    assert found(late)[0].steps[0] == pytest.approx(881, abs=straggler.WINDOW // 2)
    assert not found(passing)
    passing[1, 500:800] *= 1.5
    assert [(lag.rank, lag.is_persistent) for lag in found(passing)] == [(1, False)]


def test_nobody_is_slow_when_all_are_or_when_it_is_only_noise() -> None:
    times = own_times(None, 0.0)
    assert not straggler.slow_windows(times).any()
    times[:, 50:] *= 3
    assert not straggler.slow_windows(times).any()


def test_shares_above_their_limit_are_findings() -> None:
    def laps(**seconds: float) -> slow.Laps:
        names = slow.Laps.__dataclass_fields__
        full = {name: np.full((2, 20), seconds.get(name, 0.0)) for name in names}
        return slow.Laps(**full)

    assert not slow.bottleneck_findings(
        laps(compute_s=0.05, data_wait_s=0.001, communication_s=0.01)
    )
    found = slow.bottleneck_findings(laps(compute_s=0.05, data_wait_s=0.05, checkpoint_s=0.02))
    assert [finding[1].kind for finding in found] == [Kind.DATA_BOUND, Kind.CHECKPOINT_BOUND]


def test_communication_beyond_waiting_for_the_slowest_rank_counts_as_the_networks() -> None:
    own = np.array([[0.05], [0.10]]).repeat(20, axis=1)
    zero = np.zeros_like(own)
    waits = slow.Laps(zero, own, np.array([[0.05], [0.0]]).repeat(20, 1), zero, zero, zero)
    assert slow.shares(waits).communication == 0.0


def test_a_trace_is_summed_up_with_what_overlaps_and_what_does_not() -> None:
    def event(name: str, start: float, us: float, cat: str = "cpu_op", tid: int = 1) -> Any:
        return {"ph": "X", "name": name, "ts": start, "dur": us, "cat": cat, "pid": 1, "tid": tid}

    events = [
        event("step 5", 0, 100, "user_annotation"),
        event("aten::linear", 0, 40),
        event("aten::mm", 10, 20),
        event("gloo:all_reduce", 30, 40, "user_annotation", tid=2),
        event("aten::mm", 200, 50),  # after the step
    ]
    summary = summarize({"traceEvents": events})
    assert summary.num_steps == 1
    assert (summary.wall_s, summary.compute_s) == pytest.approx((100e-6, 40e-6))
    assert (summary.exposed_s, summary.overlapped_s) == pytest.approx((30e-6, 10e-6))
    assert {operator.name: operator.self_s for operator in summary.top} == pytest.approx(
        {"aten::linear": 20e-6, "aten::mm": 20e-6}
    )


def test_what_a_later_attempt_recovered_from_says_so() -> None:
    failed = {"kind": "failed", "step": 4, "failures": [failure(0, 1, "ValueError: no")]}
    again = {"kind": "failed", "step": 4, "failures": [failure(0, 1, "ValueError: no")]}
    done = {"kind": "finished", "step": 9}
    first, second = with_recovery([Evidence(1, end=failed), Evidence(2, end=again)])
    assert (first.severity, first.recovered_by) == (Severity.ERROR, None)
    assert first.when == "attempt 1"
    attempts = [Evidence(1, end=failed), Evidence(2, end=again), Evidence(3, end=done)]
    first, second = with_recovery(attempts)
    assert first.severity is second.severity is Severity.WARNING
    assert first.when == "attempt 1, recovered by attempt 3"
    went_on = Evidence(2, end={**again, "step": 6})
    first, second = with_recovery([Evidence(1, end=failed), went_on])
    assert (first.severity, first.recovered_by) == (Severity.ERROR, 2)


def test_what_was_not_finite_is_named_once() -> None:
    numbers = {"num_nan": 28, "num_inf": 0, "num_elements": 32, "step": 3, "what": "the loss"}
    report = {"found_in": "loss", "name": "the loss function", **numbers}
    finding = divergence.judge(Evidence(1, end={}, non_finite={0: report}))
    assert finding is not None
    assert finding.evidence[0] == "the loss function: 28 nan, 0 inf of 32 values"
    assert finding.kind.label == "non-finite loss"


@pytest.mark.parametrize(("most", "said"), [(0.213, "for 21% of"), (0.24, "for 21% to 24% of")])
def test_one_share_is_said_once(most: float, said: str) -> None:
    resources = {"0": {"starved_share": 0.21}, "1": {"starved_share": most}}
    (found,) = slow._oversubscribed(PastAttempt(1, {}, {"resources": resources}))
    assert said in found.what


def test_findings_survive_json_and_the_worst_comes_first() -> None:
    note = Finding(Severity.NOTE, Kind.LOSS_SPIKE, "a", "b", ("c",), (1, 2))
    error = Finding(Severity.ERROR, Kind.HANG, "a", "b", line="train.py:3 in f")
    assert by_severity([note, error])[0] is error
    assert Finding.from_json(json.loads(json.dumps(note.as_json()))) == note
    assert listed(range(9)) == "ranks 0, 1, 2, 3, 4 and 4 more"
    assert listed([3]) == "rank 3"


def test_a_folder_that_is_no_run_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ConfigError, match="not a run directory"):
        diagnose(tmp_path)
    with pytest.raises(ConfigError, match="no such directory"):
        diagnose(tmp_path / "nowhere")

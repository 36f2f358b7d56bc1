"""Scripts that report no progress: ranks that compute nothing and all wait for each other."""

from __future__ import annotations

from drivetrain.diagnose.evidence import Evidence
from drivetrain.diagnose.hang import judge
from drivetrain.diagnose.stacks import Stacks, parse_stacks
from drivetrain.supervise.stall import IdleWatch, Patience, hang_place, is_deadlock

_HEAD = "Current thread 0x1 (most recent call first):\n"
_SCRIPT = '  File "/home/ada/pair.py", line {} in exchange\n  File "runpy.py", line 9 in run_path\n'
_C10D = '  File "/x/site-packages/torch/distributed/distributed_c10d.py", line 5 in '


def stacks(call: str, line: int = 12) -> Stacks | None:
    return parse_stacks(_HEAD + (f"{_C10D}{call}\n" if call else "") + _SCRIPT.format(line))


def test_a_node_is_idle_from_when_its_last_rank_stopped_computing() -> None:
    watch = IdleWatch()
    assert watch.observe({10: 1.0, 11: 1.0}, 100.0) == 0.0
    assert watch.observe({10: 1.0, 11: 1.9}, 101.0) == 0.0
    assert watch.observe({10: 1.01, 11: 1.9}, 103.0) == 2.0
    assert watch.observe({10: 1.01, 11: 2.9}, 104.0) == 0.0
    assert watch.observe({10: 1.01, 11: 2.9}, 109.0) == 5.0
    assert watch.observe({20: 0.0, 11: 2.9}, 110.0) == 0.0  # a new process has only just begun


def test_looks_that_come_too_soon_count_for_nothing() -> None:
    watch = IdleWatch()
    watch.observe({10: 1.0}, 100.0)
    assert watch.observe({10: 1.0}, 102.0) == 2.0
    assert watch.observe({10: 9.0}, 102.4) == 2.0, "the last answer holds, whatever was computed"
    assert watch.observe({10: 1.0}, 102.5) == 2.5, "half a second is enough"
    assert watch.observe({10: 2.0}, 122.5) == 22.5, "a twentieth of the time is nothing yet"
    assert watch.observe({10: 4.0}, 142.5) == 0.0
    assert watch.observe({10: 4.0}, 142.6) == 0.0


def test_a_node_without_processes_that_can_be_looked_at_is_never_idle() -> None:
    watch = IdleWatch()
    assert watch.observe({}, 100.0) == 0.0
    assert watch.observe({}, 900.0) == 0.0


def test_all_in_a_call_of_torch_distributed_is_a_deadlock_at_once() -> None:
    patience = Patience(60.0, 900.0)
    both = {0: stacks("send"), 1: stacks("send")}
    one = {0: stacks("send"), 1: stacks("")}
    none = {0: stacks(""), 1: stacks("")}
    meeting = {0: stacks("init_process_group"), 1: stacks("init_process_group")}
    assert is_deadlock(both, 61.0, patience, has_peers=False)
    assert not is_deadlock(both, 60.0, patience, has_peers=False)
    assert not is_deadlock({0: None, 1: stacks("send")}, 61.0, patience, has_peers=False)
    assert is_deadlock({0: None, 1: stacks("send")}, 901.0, patience, has_peers=False)
    assert not is_deadlock(both, 900.0, patience, has_peers=True)
    assert not is_deadlock(both, 61.0, patience, has_peers=True)  # the other nodes may compute
    assert is_deadlock(both, 901.0, patience, has_peers=True)
    assert not is_deadlock(one, 61.0, patience, has_peers=False)
    assert is_deadlock(one, 901.0, patience, has_peers=False)
    assert not is_deadlock(none, 9999.0, patience, has_peers=False)  # it may sleep as it likes
    assert not is_deadlock(meeting, 61.0, patience, has_peers=False)
    assert not is_deadlock({}, 9999.0, patience, has_peers=False)


def test_the_verdict_says_which_ranks_are_in_which_call() -> None:
    evidence = Evidence(
        1,
        end={"kind": "stalled", "host": "h"},
        stacks={0: stacks("send"), 1: stacks("send"), 2: stacks("recv", 20)},
    )
    finding = judge(evidence)
    assert finding is not None
    assert finding.what == (
        "every rank waits for another: ranks 0 and 1 in send at pair.py:12 in exchange, "
        "rank 2 in recv at pair.py:20 in exchange"
    )
    assert "recv" in finding.remedy


def test_a_hang_has_a_place_if_every_rank_says_where_it_is() -> None:
    waits, stuck = stacks("all_reduce", 20), stacks("")
    assert hang_place({2: waits, 1: stuck, 0: waits}) == (
        "ranks 0 and 2 at distributed_c10d.py:5 in all_reduce, from pair.py:20 in exchange; "
        "rank 1 at pair.py:12 in exchange"
    )
    library = parse_stacks(f"{_HEAD}{_C10D}all_reduce\n")
    assert hang_place({0: library}) == "rank 0 at distributed_c10d.py:5 in all_reduce"
    assert hang_place({0: waits, 1: None}) == ""
    assert hang_place({0: parse_stacks(_HEAD)}) == ""
    assert hang_place({}) == ""

"""Why an attempt ended, from how its ranks did."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from drivetrain.record.session import Phase, RankProgress
from drivetrain.supervise.failures.failure import (
    RankFailure,
    by_cause,
    classify,
    verdict,
    was_aborted,
)
from drivetrain.supervise.policy import Budgets, End, EndKind, decide

PEER_GONE = "Traceback …\nRuntimeError: [..] Connection closed by peer [127.0.0.1]:4321"
STARTING, STEPPING = (
    RankProgress(0, Phase.STARTING, 1, 0.0),
    RankProgress(7, Phase.STEPPING, 1, 0.0),
)


def failed(*codes: int, error: str = "") -> list[RankFailure]:
    return [RankFailure(rank, 10 + rank, code, error) for rank, code in enumerate(codes)]


def of(failures: list[RankFailure], *pages: RankProgress | None, has_peers: bool = False) -> End:
    return classify(failures, pages or (STEPPING,), trains=True, has_peers=has_peers)


@pytest.mark.parametrize(
    ("codes", "kind", "exit_code"),
    [
        ((75, 75), EndKind.PREEMPTED, 75),
        ((75, 1), EndKind.FAILED, 75),  # it ended first
        ((1, 77), EndKind.STALE, 77),
        ((-9,), EndKind.FAILED, 137),
        ((3,), EndKind.FAILED, 3),
    ],
)
def test_exit_codes_have_their_meaning(
    codes: tuple[int, ...], kind: EndKind, exit_code: int
) -> None:
    end = of(failed(*codes))
    assert (end.kind, end.exit_code) == (kind, exit_code)


def test_one_that_only_noticed_a_loss_blames_another_node_if_there_is_one() -> None:
    noticed = failed(1, error=PEER_GONE)
    assert of(noticed, has_peers=True).kind is EndKind.PEER
    assert of(noticed, has_peers=False).kind is EndKind.FAILED
    killed = [*noticed, RankFailure(1, 11, -9)]
    assert of(killed, has_peers=True).kind is EndKind.FAILED


def test_before_any_rank_has_left_its_start_it_is_a_failure_of_the_start() -> None:
    assert of(failed(1), STARTING, None).kind is EndKind.START_UP
    assert of(failed(1), STARTING, STEPPING).kind is EndKind.FAILED
    assert of(failed(75), STARTING).kind is EndKind.PREEMPTED


def test_the_end_knows_the_furthest_step_and_whether_a_signal_caused_it() -> None:
    end = of(failed(-9), None, STARTING, STEPPING)
    assert (end.step, end.by_signal) == (7, True)
    assert not of(failed(1)).by_signal


def test_an_abort_counts_where_it_is_the_cause() -> None:
    assert was_aborted(failed(-6, 1))
    assert not was_aborted(failed(-9, 1))
    assert not was_aborted([])


def test_signals_have_names_and_codes_as_a_shell_reports_them() -> None:
    known, unknown, own = failed(-15, -99, 3)
    assert (known.killed_by, known.how) == ("SIGTERM", "was killed by SIGTERM")
    assert (unknown.killed_by, unknown.process_exit_code) == ("signal 99", 227)
    assert (own.killed_by, own.how, own.process_exit_code) == (None, "failed with exit code 3", 3)
    assert RankFailure(0, 1, 0).killed_by is None
    assert RankFailure(0, 1, 0).process_exit_code == 0


@pytest.mark.parametrize(
    "line",
    [
        "RuntimeError: Connection reset by peer",
        "RuntimeError: Broken pipe",
        "RuntimeError: Gloo connectFullMesh failed with",
        "RuntimeError: socket closed",
        "torch.distributed.DistNetworkError: x",
        "torch.distributed.DistStoreError: x",
        "RuntimeError: recvValueWithTimeout",
        "RuntimeError: failed to recv, got 0 bytes",
    ],
)
def test_what_a_rank_says_that_only_noticed_a_loss(line: str) -> None:
    assert failed(1, error=f"Traceback …\n{line}\n")[0].is_collateral
    assert not failed(1, error=f"{line}\nValueError: mine\n")[0].is_collateral


@pytest.mark.parametrize("kind", ["ConnectionResetError", "BrokenPipeError", "ConnectionError"])
def test_a_connection_of_the_scripts_own_is_its_own_affair(kind: str) -> None:
    line = f"{kind}: [Errno 104] Connection reset by peer"
    assert not failed(1, error=f"Traceback …\n{line}")[0].is_collateral
    assert not failed(1)[0].is_collateral


def test_the_cause_comes_before_what_followed_from_it() -> None:
    ended = RankFailure(0, 10, -15, at_s=1.0)
    noticed = RankFailure(1, 11, 1, PEER_GONE, at_s=0.5)
    later, erred = RankFailure(2, 12, 1, "ValueError: x", 3.0), RankFailure(3, 13, 1, "", 2.0)
    killed = RankFailure(4, 14, -9, at_s=9.0)
    ordered = by_cause([ended, noticed, later, erred, killed])
    assert ordered == [killed, erred, later, noticed, ended]
    before = RankFailure(5, 15, -15, at_s=0.1)
    assert by_cause([ended, before]) == [before, ended]


TRACEBACK = """Traceback (most recent call last):
  File "/home/ada/train.py", line 31, in loss
    raise error
{}
"""


@pytest.mark.parametrize(
    ("line", "is_mistake"),
    [
        ("ValueError: shapes", True),
        ("KeyError: 'x'", True),
        ("ZeroDivisionError: division by zero", True),
        ("RuntimeError: shapes cannot be multiplied", True),
        ("RuntimeError: CUDA error: an illegal address", False),
        ("RuntimeError: DataLoader worker (pid 3) exited", False),
        ("ValueError: timed out", False),
        ("OSError: no such file", False),
        ("MemoryError", False),
    ],
)
def test_a_mistake_of_the_code_has_a_place(line: str, is_mistake: bool) -> None:
    failure = failed(1, error=TRACEBACK.format(line))[0]
    assert failure.said == line
    name = line.partition(":")[0]
    place = f"{name} at train.py:31 in loss"
    assert failure.fault == (place if is_mistake else "")
    assert of([failure]).fault == failure.fault


def test_the_verdict_folds_what_followed_and_gives_the_cause_in_full() -> None:
    cause = RankFailure(2, 12, 1, "Traceback …\nValueError: x\n", 1.0)
    ended = [RankFailure(rank, 10 + rank, -15, at_s=2.0) for rank in (3, 1)]
    assert verdict([*ended, cause], "node-7") == (
        "rank 2 (pid 12, node-7) failed first: exit code 1\n"
        "(ranks 1, 3 stopped because of it)\n\nTraceback …\nValueError: x"
    )
    assert verdict(failed(-11, -15), "h") == (
        "rank 0 (pid 10, h) failed first: killed by SIGSEGV\n(rank 1 stopped because of it)"
    )
    alone = verdict(failed(-9), "h")
    assert alone.startswith("rank 0 (pid 10, h) failed first: killed by SIGKILL, without a trace")
    assert "out of memory" in alone
    assert "stopped because" not in alone


def test_before_a_run_is_open_no_micro_batch_is_to_blame() -> None:
    killed = verdict(failed(-9), "h", is_starting=True)
    assert killed == (
        "rank 0 (pid 10, h) failed first: killed by SIGKILL, without a traceback: either something "
        "outside the run killed it, or the kernel did because memory ran out (then `dmesg` says "
        "so)"
    )
    assert verdict(failed(-11), "h", is_starting=True) == (
        "rank 0 (pid 10, h) failed first: killed by SIGSEGV: native code crashed; "
        "PYTHONFAULTHANDLER=1 shows the Python stack"
    )
    assert verdict(failed(-15), "h", is_starting=True).endswith("killed by SIGTERM")
    assert verdict(failed(-7), "h", is_starting=True).endswith("killed by SIGBUS")


def test_a_crash_of_its_own_code_is_no_kill_from_outside() -> None:
    def is_from_outside(name: str) -> bool:
        return failed(-signal.Signals[name])[0].was_killed_from_outside

    outside = ("SIGKILL", "SIGTERM", "SIGBUS", "SIGHUP", "SIGINT", "SIGUSR1")
    assert all(is_from_outside(name) for name in outside)
    crashes = ("SIGSEGV", "SIGABRT", "SIGILL", "SIGFPE", "SIGTRAP", "SIGSYS")
    assert not any(is_from_outside(name) for name in crashes)
    assert not failed(1)[0].was_killed_from_outside


def test_a_refused_config_is_said_without_naming_who_was_first() -> None:
    refused = RankFailure(1, 11, 2, "seed = x: must be a whole number\n", 1.0)
    ended = RankFailure(0, 10, -15, at_s=2.0)
    assert verdict([ended, refused], "h") == "seed = x: must be a whole number"


def test_an_exit_with_2_and_no_word_is_a_command_line_that_was_refused() -> None:
    said = verdict(failed(2), "h")
    assert said.startswith("rank 0 (pid 10, h) failed first: exit code 2, without a traceback")
    assert "the launcher's own flags go before the script" in said


def test_a_script_that_does_not_train_is_known_as_one() -> None:
    end = classify(failed(1), [None], trains=False, has_peers=False)
    assert (end.kind, end.step, end.trains) == (EndKind.START_UP, 0, False)
    assert of(failed(1), STARTING, RankProgress(7, Phase.SAVING, 1, 0.0)).kind is EndKind.FAILED


MISTAKES = [
    *("ArithmeticError", "AssertionError", "AttributeError", "ImportError", "IndexError"),
    *("IndentationError", "KeyError", "ModuleNotFoundError", "NameError", "RecursionError"),
    *("NotImplementedError", "SyntaxError", "TypeError", "UnboundLocalError", "ValueError"),
    *("RuntimeError", "ZeroDivisionError"),
]
AT = 'Traceback (most recent call last):\n  File "/home/me/train.py", line 7, in step\n    f()\n'


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_of_the_code_is_one_by_its_type(name: str) -> None:
    assert RankFailure(0, 10, 1, f"{AT}{name}: a: b").fault.startswith(f"{name} at ")


@pytest.mark.parametrize(
    "said",
    [
        "RuntimeError: CUDA error: an illegal memory access",
        "RuntimeError: cuda out of MEMORY: tried",
        "torch.OutOfMemoryError: device 0",
        "ValueError: no such device: 3",
        "OSError: no route to host",
        "KeyboardInterrupt",
    ],
)
def test_what_the_world_around_it_did_is_no_mistake(said: str) -> None:
    assert RankFailure(0, 10, 1, f"{AT}{said}").fault == ""


def test_a_rank_that_said_nothing_has_nothing_to_show() -> None:
    failure = RankFailure(3, 13, 1)
    assert (failure.error, failure.said, failure.fault, failure.at_s) == ("", "", "", 0.0)
    assert "\n" not in verdict([failure], "node-1")


def test_the_whole_traceback_is_named_where_a_part_is_shown() -> None:
    library = '  File "/x/site-packages/torch/nn.py", line 1, in call\n    g()\n'
    raised = '  File "/home/me/train.py", line 9, in g\n    raise ValueError\n'
    failure = RankFailure(0, 10, 1, f"{AT}{library}{raised}ValueError: wrong")
    text = verdict([failure], "node-1", Path("tracebacks/0.txt"))
    head, _, shown = text.partition("\n\n")
    assert head.startswith("rank 0 (pid 10, node-1) failed first")
    assert head.endswith("(only your own calls are shown; full traceback: tracebacks/0.txt)")
    assert "site-packages" not in shown
    assert shown.endswith("raise ValueError\nValueError: wrong")
    plain = RankFailure(0, 10, 1, f"{AT}ValueError: wrong")
    assert "only your own calls" not in verdict([plain], "node-1", Path("tracebacks/0.txt"))


def test_a_mistake_before_the_first_step_is_not_tried_again() -> None:
    first = End(EndKind.FAILED, 0, fault="ValueError at train.py:3 in f")
    assert not decide(first, [], Budgets()).restart
    assert decide(End(EndKind.FAILED, 0), [], Budgets()).restart  # it may pass
    assert decide(first, [End(EndKind.FAILED, 7)], Budgets()).restart  # it has been further


def test_who_only_noticed_is_not_blamed() -> None:
    lost = "Traceback …\nRuntimeError: [..] Connection closed by peer [127.0.0.1]:4321"
    failure = RankFailure(0, 10, 1, f"{lost}\nraised by the evaluation after step 4")
    assert failure.is_collateral
    assert failure.fault == ""


@pytest.mark.parametrize(
    ("said", "is_fault"),
    [
        ("RuntimeError: CUDA out of memory", False),
        ("torch.OutOfMemoryError: on this device", False),
        ("RuntimeError: shapes", True),
        ("torch.Odd: shapes", True),
        ("Odd: on this device", True),
    ],
)
def test_in_the_users_own_code_all_but_torchs_troubles_count(said: str, is_fault: bool) -> None:
    failure = RankFailure(0, 10, 1, f"{AT}{said}\nraised by the hook Upload.on_log")
    assert failure.fault == (f"{said} at train.py:7 in step" if is_fault else "")

from __future__ import annotations

import pytest

from drivetrain.core.errors import exception_line
from drivetrain.supervise.failures.attempt_report import AttemptReport
from drivetrain.supervise.failures.failure import RankFailure, root_cause, verdict
from drivetrain.supervise.failures.reporting import paragraph
from drivetrain.supervise.policy import End, EndKind

MANY_LINES = """Traceback (most recent call last):
  File "/home/ada/train.py", line 31, in loss
    check(batch)
    ^^^^^^^^^^^^
ValueError: shapes do not fit:
  (3, 4)
and (4, 5)
"""
IN_A_WORKER = """Traceback (most recent call last):
  File "/home/ada/train.py", line 9, in <module>
    next(it)
KeyError: Caught KeyError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "/home/ada/data.py", line 3, in __getitem__
    return self.rows[index]
KeyError: 'missing'

"""
PEER_GONE = "Traceback …\nRuntimeError: [..] Connection closed by peer [127.0.0.1]:4321"
OWN = "Traceback …\nValueError: no such token"


def test_a_killed_rank_comes_before_those_that_noticed() -> None:
    killed = RankFailure(1, 11, -9, at_s=20.0)
    noticed = RankFailure(0, 10, 1, PEER_GONE, at_s=10.0)
    assert root_cause([noticed, killed]) is killed


def test_an_own_error_comes_before_a_lost_connection_whatever_the_clock_says() -> None:
    own = RankFailure(2, 12, 1, OWN, at_s=20.5)
    noticed = RankFailure(0, 10, 1, PEER_GONE, at_s=20.0)
    ended = RankFailure(1, 11, -15, at_s=0.0)
    assert root_cause([noticed, ended, own]) is own


def test_of_two_own_errors_the_first_is_the_cause() -> None:
    late, early = RankFailure(0, 1, 1, OWN, at_s=2.0), RankFailure(3, 2, 1, OWN, at_s=1.0)
    assert root_cause([late, early]) is early


def test_an_error_that_only_quotes_a_lost_connection_is_an_own_one() -> None:
    text = "Traceback …\nConnectionError: Connection closed by peer\n…\nKeyError: 'x'"
    assert not RankFailure(0, 1, 1, text).is_collateral


def test_the_traceback_is_what_the_user_reads_last() -> None:
    text = verdict([RankFailure(0, 10, 1, PEER_GONE), RankFailure(1, 11, 1, OWN)], "node-a")
    assert text.splitlines()[0] == "rank 1 (pid 11, node-a) failed first: exit code 1"
    assert text.splitlines()[1] == "(rank 0 stopped because of it)"
    assert text.endswith("ValueError: no such token")


def test_ranks_that_found_a_loss_not_finite_did_not_stop_because_of_another() -> None:
    nan = (
        "Traceback …\nNonFiniteLoss: train/loss = nan at step 40 on rank {}: the loss is not finite"
    )
    found = [RankFailure(rank, 10 + rank, 6, nan.format(rank), at_s=rank) for rank in (1, 2, 3)]
    text = verdict([RankFailure(0, 10, -15, at_s=9.0), *found], "node-a")
    assert text.splitlines()[:3] == [
        "rank 1 (pid 11, node-a) failed first: exit code 6",
        "(the same was found on ranks 2 and 3)",
        "(rank 0 stopped because of it)",
    ]


def test_a_sigkill_is_explained() -> None:
    assert "out of memory" in verdict([RankFailure(1, 11, -9)], "node-a")
    assert RankFailure(1, 11, -9).process_exit_code == 137


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (MANY_LINES, "ValueError: shapes do not fit:"),
        (IN_A_WORKER, "KeyError: 'missing'"),
        (OWN, "ValueError: no such token"),
        ("", ""),
    ],
)
def test_the_line_that_says_what_happened(text: str, line: str) -> None:
    assert exception_line(text) == line


def test_a_failure_is_summed_up_by_its_exception() -> None:
    account = AttemptReport(
        End(EndKind.FAILED, 7), [RankFailure(0, 10, 1, MANY_LINES)], "h", "", "", True
    )
    assert "after step 7: ValueError: shapes do not fit:; restarting" in paragraph(account)


def test_a_failure_after_a_resume_says_so() -> None:
    failures = [RankFailure(0, 10, 1, OWN)]
    resumed = AttemptReport(End(EndKind.START_UP, 40), failures, "h", "", "", True)
    assert "exit code 1 after resuming from step 40: ValueError" in paragraph(resumed)
    first = AttemptReport(End(EndKind.START_UP, 0), failures, "h", "", "", True)
    assert "exit code 1 before its first step: ValueError" in paragraph(first)


def test_a_mistake_has_a_place_and_what_may_pass_has_none() -> None:
    assert RankFailure(0, 10, 1, MANY_LINES).fault == "ValueError at train.py:31 in loss"
    assert RankFailure(0, 10, -9).fault == ""
    lost = MANY_LINES.replace("ValueError", "ConnectionResetError")
    assert RankFailure(0, 10, 1, lost).fault == ""
    shapes = MANY_LINES.replace("ValueError", "RuntimeError")
    assert RankFailure(0, 10, 1, shapes).fault == "RuntimeError at train.py:31 in loss"
    for said in ("CUDA error: unspecified launch failure", "Connection reset by peer"):
        text = shapes.replace("shapes do not fit:", said)
        assert RankFailure(0, 10, 1, text).fault == ""
    device = MANY_LINES.replace("ValueError", "torch.AcceleratorError")
    assert RankFailure(0, 10, 1, device).fault == ""

from __future__ import annotations

from drivetrain.supervise.ending.failure import RankFailure, root_cause, verdict

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


def test_a_sigkill_is_explained() -> None:
    assert "out of memory" in verdict([RankFailure(1, 11, -9)], "node-a")
    assert RankFailure(1, 11, -9).process_exit_code == 137

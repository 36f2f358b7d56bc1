"""Why an attempt ended, from how its ranks did."""

from __future__ import annotations

import pytest

from drivetrain.record.session import Phase, Progress
from drivetrain.supervise.ending.classify import classify
from drivetrain.supervise.ending.failure import RankFailure, was_aborted
from drivetrain.supervise.policy import End, Kind

PEER_GONE = "Traceback …\nRuntimeError: [..] Connection closed by peer [127.0.0.1]:4321"
STARTING, STEPPING = (Progress(0, Phase.STARTING, 1, 0.0), Progress(7, Phase.STEPPING, 1, 0.0))


def failed(*codes: int, error: str = "") -> list[RankFailure]:
    return [RankFailure(rank, 10 + rank, code, error) for rank, code in enumerate(codes)]


def of(failures: list[RankFailure], *pages: Progress | None, has_peers: bool = False) -> End:
    return classify(failures, pages or (STEPPING,), trains=True, has_peers=has_peers)


@pytest.mark.parametrize(
    ("codes", "kind", "exit_code"),
    [
        ((75, 75), Kind.PREEMPTED, 75),
        ((75, 1), Kind.FAILED, 75),  # it ended first
        ((1, 77), Kind.STALE, 77),
        ((-9,), Kind.FAILED, 137),
        ((3,), Kind.FAILED, 3),
    ],
)
def test_exit_codes_have_their_meaning(codes: tuple[int, ...], kind: Kind, exit_code: int) -> None:
    end = of(failed(*codes))
    assert (end.kind, end.exit_code) == (kind, exit_code)


def test_one_that_only_noticed_a_loss_blames_another_node_if_there_is_one() -> None:
    noticed = failed(1, error=PEER_GONE)
    assert of(noticed, has_peers=True).kind is Kind.PEER
    assert of(noticed, has_peers=False).kind is Kind.FAILED
    killed = [*noticed, RankFailure(1, 11, -9)]
    assert of(killed, has_peers=True).kind is Kind.FAILED


def test_before_any_rank_has_left_its_start_it_is_a_failure_of_the_start() -> None:
    assert of(failed(1), STARTING, None).kind is Kind.START_UP
    assert of(failed(1), STARTING, STEPPING).kind is Kind.FAILED
    assert of(failed(75), STARTING).kind is Kind.PREEMPTED


def test_the_end_knows_the_furthest_step_and_whether_a_signal_caused_it() -> None:
    end = of(failed(-9), None, STARTING, STEPPING)
    assert (end.step, end.by_signal) == (7, True)
    assert not of(failed(1)).by_signal


def test_an_abort_counts_where_it_is_the_cause() -> None:
    assert was_aborted(failed(-6, 1))
    assert not was_aborted(failed(-9, 1))
    assert not was_aborted([])

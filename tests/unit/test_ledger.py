from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.record.ledger import CLASSES, Ledger, make_ledger
from drivetrain.record.reading import Event, PastAttempt
from drivetrain.record.reading.files import Table
from drivetrain.record.step_file import COMPILES, FIELDS
from drivetrain.view.describe import ledger_view

STEP_S = 1.0


def steps(
    attempt: int, numbers: Sequence[int], begin_s: float, flags: int = 0, **seconds: float
) -> Table:
    """Laps of a second each that follow each other; what is not said is compute."""
    table = np.zeros(len(numbers), np.dtype(list(FIELDS)))
    table["step"], table["attempt"], table["flags"] = list(numbers), attempt, flags
    table["start_s"] = begin_s + STEP_S * np.arange(len(numbers))
    for name, value in seconds.items():
        table[name] = value
    table["compute_s"] = STEP_S - sum(seconds.values())
    return table


def attempt(number: int, command_s: float, launched_s: float, **end: Any) -> PastAttempt:
    start = {"command_s": command_s, "launched_s": launched_s, "started_s": launched_s + 1}
    return PastAttempt(number, start, end)


def account(
    attempts: Sequence[PastAttempt], tables: Sequence[Table], events: Sequence[Event] = ()
) -> tuple[Ledger, dict[str, float]]:
    ledger = make_ledger(attempts, list(enumerate(tables)), events)
    assert abs(ledger.unaccounted_s) < 1e-6 * max(1.0, ledger.wall_s)
    return ledger, {n: round(s, 6) for n, s in ledger.seconds.items() if abs(s) > 1e-9}


def test_a_clean_run() -> None:
    table = steps(1, range(1, 11), 105.0, data_wait_s=0.25, communication_s=0.125)
    last_save = Event("span", "last_save", 115.0, 10, 0.5)
    ledger, seconds = account(
        [attempt(1, 100.0, 102.0, kind="finished", time_s=116.0)], [table], [last_save]
    )
    assert (ledger.start_s, ledger.end_s) == (100.0, 116.0)
    assert seconds == {
        "productive": 6.25,
        "data_wait": 2.5,
        "communication": 1.25,
        "checkpoint": 0.5,
        "start_up": 5.5,
    }
    assert ledger.goodput == pytest.approx(6.25 / 16)


def test_a_killed_run_pays_for_recovery_and_for_steps_done_again() -> None:
    table = np.concatenate([steps(1, range(1, 6), 105.0), steps(2, range(3, 11), 113.0)])
    attempts = [
        attempt(1, 100.0, 102.0, kind="failed", time_s=110.5, restarts=True),
        attempt(2, 100.0, 111.0, kind="finished", time_s=121.0),
    ]
    ledger, seconds = account(attempts, [table])
    # two steps, and the half that was under way; from 110.5 to the next step at 113
    assert seconds == {"productive": 10.0, "start_up": 5.0, "redone": 3.5, "recovery": 2.5}
    assert ledger.wall_s == 21.0
    gap = next(segment for segment in ledger.segments if segment.attempt == 0)
    assert (gap.start_s, gap.end_s) == (110.5, 111.0)


def test_time_between_a_preemption_and_the_next_command_is_nobodys_fault() -> None:
    table = np.concatenate([steps(1, range(1, 6), 105.0), steps(2, range(6, 11), 203.0)])
    attempts = [
        attempt(1, 100.0, 102.0, kind="preempted", time_s=110.25),
        attempt(2, 200.0, 201.0, kind="finished", time_s=208.0),
    ]
    _, seconds = account(attempts, [table])
    assert seconds == {"productive": 10.0, "start_up": 8.0, "preempted": 90.0}


def test_a_run_that_was_given_up_and_taken_up_again_was_idle() -> None:
    table = np.concatenate([steps(1, range(1, 6), 105.0), steps(2, range(6, 11), 203.0)])
    attempts = [
        attempt(1, 100.0, 102.0),  # killed together with its supervisor: nobody wrote its end
        attempt(2, 200.0, 201.0, kind="finished", time_s=208.0),
    ]
    _, seconds = account(attempts, [table])
    assert seconds == {"productive": 10.0, "start_up": 8.0, "idle": 90.0}


def test_the_time_until_a_finished_run_is_extended_is_not_counted() -> None:
    table = np.concatenate([steps(1, range(1, 6), 105.0), steps(2, range(6, 11), 10_203.0)])
    attempts = [
        attempt(1, 100.0, 102.0, kind="finished", time_s=110.0),
        attempt(2, 10_200.0, 10_201.0, kind="finished", time_s=10_208.0),
    ]
    ledger, seconds = account(attempts, [table])
    assert seconds == {"productive": 10.0, "start_up": 8.0}
    assert (ledger.wall_s, ledger.between_runs_s) == (18.0, 10_090.0)
    assert ledger.goodput == pytest.approx(10 / 18)
    view = ledger_view(ledger)
    assert view is not None
    assert (view.wall_s, view.between_runs_s) == pytest.approx((18.0, 10_090.0))
    assert sum(float(each.sum()) for each in view.over_time.values()) == pytest.approx(18.0)


def test_nothing_was_redone_after_a_failure_that_ended_the_run() -> None:
    table = steps(1, range(1, 6), 105.0)
    failed = attempt(1, 100.0, 102.0, kind="failed", time_s=110.5)
    assert account([failed], [table])[1] == {"productive": 5.0, "start_up": 5.5}


def test_a_stall_lasts_from_the_last_step_until_it_was_noticed() -> None:
    table = np.concatenate([steps(1, range(1, 6), 105.0), steps(2, range(5, 11), 143.0)])
    attempts = [
        attempt(1, 100.0, 102.0, kind="stalled", time_s=140.0, restarts=True),
        attempt(2, 100.0, 141.0, kind="finished", time_s=149.0),
    ]
    _, seconds = account(attempts, [table])
    assert seconds == {
        "productive": 10.0,
        "start_up": 5.0,
        "stalled": 30.0,
        "redone": 1.0,
        "recovery": 3.0,
    }


def test_a_command_is_over_when_its_supervisor_is() -> None:
    ended = attempt(1, 100.0, 102.0, kind="finished", time_s=111.0)
    closed = PastAttempt(1, ended.start, ended.end, {"time_s": 112.5, "exit_code": 0})
    ledger, seconds = account([closed], [steps(1, range(1, 6), 105.0)])
    assert ledger.wall_s == 12.5
    assert seconds == {"productive": 5.0, "start_up": 7.5}


def test_a_stall_before_the_first_step() -> None:
    _, seconds = account([attempt(1, 100.0, 102.0, kind="stalled", time_s=140.0)], [])
    assert seconds == {"start_up": 3.0, "stalled": 37.0}


def test_a_node_that_takes_over_goes_on_with_the_run_and_does_not_begin_it_anew() -> None:
    """Rank 0 is on another node after a resize, and its command began at another time."""
    table = np.concatenate([steps(1, range(1, 6), 105.0), steps(2, range(6, 11), 113.0)])
    attempts = [
        attempt(1, 100.0, 102.0, kind="resized", time_s=110.0),
        attempt(2, 107.0, 112.0, kind="finished", time_s=118.0),
    ]
    _, seconds = account(attempts, [table])
    assert seconds == {"productive": 10.0, "start_up": 5.0, "recovery": 3.0}


def test_ranks_of_different_sizes_of_the_run_are_averaged_within_each_attempt() -> None:
    both = np.concatenate([steps(1, [1, 2], 102.0), steps(2, [3, 4], 104.0)])
    second = steps(2, [3, 4], 104.0, communication_s=0.5)
    attempts = [
        attempt(1, 100.0, 101.0, kind="resized", time_s=104.0),
        attempt(2, 100.0, 104.0, kind="finished", time_s=106.0),
    ]
    ledger, seconds = account(attempts, [both, second])
    assert seconds == {"start_up": 2.0, "productive": 3.5, "communication": 0.5}
    assert ledger.num_ranks == 2


def test_evaluation_is_taken_out_of_the_lap_it_followed() -> None:
    table = steps(1, range(1, 5), 105.0, other_s=0.5)
    events = [
        Event("span", "evaluation", 106.5, 2, 0.5),
        Event("span", "evaluation", 109.0, 4, 2.0),  # after the last step
    ]
    _, seconds = account([attempt(1, 100.0, 102.0, kind="finished", time_s=112.0)], [table], events)
    assert seconds == {"productive": 3.5, "evaluation": 2.5, "start_up": 6.0}


def test_the_first_steps_extra_time_is_the_compilers() -> None:
    first, rest = steps(1, [1], 105.0, flags=COMPILES), steps(1, [2, 3], 108.0)
    first["compute_s"] = 3.0
    table = np.concatenate([first, rest])
    _, seconds = account([attempt(1, 104.0, 104.5, kind="finished", time_s=110.0)], [table])
    assert seconds == {"productive": 3.0, "compile": 2.0, "start_up": 1.0}


def test_a_live_replica_that_had_to_try_again_was_recovering() -> None:
    table = np.concatenate([steps(1, [1, 2], 105.0), steps(1, [3, 4], 110.0)])
    ended = attempt(1, 105.0, 105.0, kind="finished", time_s=112.0)
    again = Event("instant", "live_step_again", 108.0, 3)
    assert account([ended], [table], [again])[1] == {"productive": 4.0, "recovery": 3.0}


def test_a_run_that_goes_on_is_accounted_for_up_to_its_last_sign() -> None:
    table = steps(1, range(1, 6), 105.0)
    sign = Event("scalars", "", 110.5, 5)
    ledger, seconds = account([attempt(1, 100.0, 102.0)], [table], [sign])
    assert ledger.end_s == 110.5
    assert seconds == {"start_up": 5.0, "productive": 5.5}


def test_without_a_supervisor_the_ranks_own_word_counts() -> None:
    table = steps(1, range(1, 6), 105.0)
    events = [Event("instant", "run_end", 111.0)]
    _, seconds = account([attempt(1, 100.0, 102.0)], [table], events)
    assert seconds == {"start_up": 6.0, "productive": 5.0}


@pytest.mark.parametrize("second_s", [106.0, 110.25, 90.0], ids=["at once", "amid", "clock behind"])
def test_attempts_that_overlap_share_the_wall_clock(second_s: float) -> None:
    """Two launchers on one run, or two hosts whose clocks differ: no share exceeds the whole."""
    tables = [steps(1, range(1, 21), 105.0), steps(2, range(1, 21), second_s + 2)]
    attempts = [
        attempt(1, 100.0, 102.0, kind="finished", time_s=126.0),
        attempt(2, second_s, second_s + 1, kind="finished", time_s=second_s + 23),
    ]
    ledger, seconds = account(attempts, [np.concatenate(tables)])
    assert all(value >= 0 for value in seconds.values()), seconds
    assert sum(seconds.values()) == pytest.approx(ledger.wall_s)
    assert ledger.goodput <= 1


def test_a_directory_without_an_attempt_has_an_empty_ledger() -> None:
    ledger, seconds = account([], [])
    assert (ledger.wall_s, ledger.goodput, seconds) == (0.0, 0.0, {})


@given(
    st.lists(
        st.tuples(
            st.integers(0, 6),  # steps gone back
            st.integers(0, 20),  # steps done
            st.sampled_from(["finished", "failed", "stalled", "preempted", "resized", None]),
            st.booleans(),  # restarted by the same command
            st.floats(0, 50),  # until somebody noticed
            st.floats(0, 100),  # until it was started again
        ),
        min_size=1,
        max_size=6,
    ),
    st.integers(1, 3),
)
@settings(max_examples=50)
def test_whatever_happens_the_classes_add_up_to_the_wall_clock(
    lives: list[tuple[int, int, str | None, bool, float, float]], num_ranks: int
) -> None:
    now_s, command_s, at = 1000.0, 1000.0, 0
    attempts, tables = [], []
    for number, (back, done, kind, same, noticed_s, gap_s) in enumerate(lives, 1):
        if not same:
            command_s = now_s
        launched_s = now_s + 0.5
        at = max(0, at - back)
        tables.append(steps(number, range(at + 1, at + done + 1), launched_s + 2, data_wait_s=0.5))
        at += done
        end_s = launched_s + 2 + done * STEP_S + noticed_s
        end = {} if kind is None else {"kind": kind, "time_s": end_s}
        attempts.append(attempt(number, command_s, launched_s, **end))
        now_s = end_s + gap_s
    ledger, seconds = account(attempts, [np.concatenate(tables)] * num_ranks)
    assert set(seconds) <= set(CLASSES)
    assert all(value >= -1e-6 for value in seconds.values())
    # the steps the run has come to count once, however often they were done
    assert seconds.get("productive", 0) + seconds.get("data_wait", 0) >= at * STEP_S - 1e-6
    assert ledger.start_s == 1000.0

"""Supervision, stepped by hand: no processes, no sleeping."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from drivetrain.record.session import Phase, Progress, ProgressPage, page_path, read_progress
from drivetrain.supervise.machine import Action, Machine, State
from drivetrain.supervise.policy import Budgets, End, Kind, decide
from drivetrain.supervise.stall import Patience, StallWatch

FAILED = End(Kind.FAILED, 7)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def machine() -> tuple[Machine, Clock]:
    clock = Clock()
    return Machine(Budgets(), clock, grace_s=30), clock


def test_a_run_without_trouble() -> None:
    m, _ = machine()
    assert m.met() == [Action.START]
    assert m.ended(End(Kind.FINISHED, 100, 0)) == []
    assert m.state is State.FINISHING
    assert m.others_ended() == [Action.LEAVE]
    assert (m.state, m.exit_code) == (State.OVER, 0)


def test_a_failure_ends_the_workers_and_meets_again() -> None:
    m, _ = machine()
    m.met()
    assert m.ended(FAILED) == [Action.KILL, Action.MEET]
    assert m.state is State.MEETING
    assert m.met() == [Action.START]


def test_a_stall_writes_down_the_stacks_first() -> None:
    m, _ = machine()
    m.met()
    assert m.ended(End(Kind.STALLED, 7)) == [Action.DUMP_STACKS, Action.KILL, Action.MEET]


def test_asked_to_stop_the_ranks_get_their_grace() -> None:
    m, clock = machine()
    m.met()
    assert m.asked("SIGTERM") == [Action.ASK]
    clock.now_s = 29
    assert m.tick() == []
    assert m.ended(End(Kind.PREEMPTED, 12, 75)) == [Action.KILL, Action.LEAVE]
    assert m.exit_code == 75


def test_out_of_grace_they_are_ended_and_the_code_still_says_resume_me() -> None:
    m, clock = machine()
    m.met()
    m.asked("SIGTERM")
    clock.now_s = 31
    assert m.tick() == [Action.KILL, Action.LEAVE]
    assert (m.exit_code, m.state) == (75, State.OVER)
    assert "30 s" in m.why


def test_asked_twice_means_now_but_a_scheduler_that_signals_everybody_asks_once() -> None:
    m, clock = machine()
    m.met()
    m.asked("SIGTERM")
    assert m.asked("SIGTERM") == []
    clock.now_s = 2
    assert m.asked("SIGTERM") == [Action.KILL, Action.LEAVE]


def test_preempted_while_starting_it_still_says_resume_me() -> None:
    m, _ = machine()
    m.met()
    m.asked("SIGTERM")
    m.ended(End(Kind.START_UP, 0, 143))
    assert m.exit_code == 75


def test_a_node_that_finished_goes_back_for_one_that_failed() -> None:
    m, _ = machine()
    m.met()
    m.ended(End(Kind.FINISHED, 100, 0))
    assert m.rejoin() == [Action.KILL, Action.MEET]
    assert m.met() == [Action.START]


def test_a_transition_that_cannot_be_is_refused() -> None:
    m, _ = machine()
    with pytest.raises(RuntimeError, match="MEETING"):
        m.others_ended()


def test_nodes_that_could_not_meet_leave_so_that_they_are_started_again() -> None:
    m, _ = machine()
    m.could_not_meet()
    assert (m.state, m.exit_code) == (State.OVER, 75)


def test_who_comes_too_late_has_failed_unless_the_others_have_finished() -> None:
    codes = []
    for has_finished in (True, False):
        m, _ = machine()
        m.came_too_late(has_finished=has_finished)
        assert m.state is State.OVER
        codes.append(m.exit_code)
    assert codes == [0, 1]


def test_budgets_are_separate() -> None:
    budgets = Budgets(failures=2, preemptions=5, start_ups=1)
    failures = [End(Kind.FAILED, step) for step in (3, 9)]
    start_up = End(Kind.START_UP, 0, by_signal=True)
    assert not decide(End(Kind.FAILED, 20), failures, budgets).restart
    assert decide(End(Kind.PREEMPTED, 20, 75), failures, budgets).restart
    assert decide(start_up, failures, budgets).restart
    assert not decide(start_up, [start_up], budgets).restart
    assert decide(End(Kind.PEER, 20), failures * 50, budgets).restart


def test_an_error_of_its_own_before_the_first_step_ends_a_first_life_only() -> None:
    own_error = End(Kind.START_UP, 0)
    assert not decide(own_error, [], Budgets()).restart
    assert decide(own_error, [FAILED], Budgets()).restart
    assert decide(End(Kind.START_UP, 0, 137, by_signal=True), [], Budgets()).restart


def test_nodes_that_only_ever_see_the_others_end_do_not_go_on_for_ever() -> None:
    peer = End(Kind.PEER, 0)
    assert decide(peer, [peer] * 5, Budgets()).restart
    decision = decide(peer, [peer] * 6, Budgets())
    assert not decision.restart
    assert "can the nodes reach each other?" in decision.why


def test_a_crash_loop_at_one_step_stops_with_the_reason() -> None:
    history = [FAILED, End(Kind.PREEMPTED, 7, 75), FAILED]
    decision = decide(FAILED, history, Budgets(failures=100))
    assert not decision.restart
    assert "after step 7: a crash loop" in decision.why
    assert decide(End(Kind.FAILED, 8), history, Budgets(failures=100)).restart


@pytest.mark.parametrize("code", [2, 3, 4, 6, 7, 8])
def test_what_would_end_the_same_way_is_not_started_again(code: int) -> None:
    assert not decide(End(Kind.FAILED, 7, code), [], Budgets()).restart


def test_a_script_without_steps_is_restarted_only_when_asked_for() -> None:
    end = End(Kind.START_UP, 0, trains=False)
    assert not decide(end, [], Budgets()).restart
    assert decide(end, [], Budgets(restarts_anything=True)).restart


def page(
    step: int, at_s: float, phase: Phase = Phase.STEPPING, slowest_step_s: float = 0.1
) -> Progress:
    return Progress(step, phase, 1, at_s, slowest_step_s)


def test_the_time_out_is_learned_from_the_runs_own_steps() -> None:
    watch = StallWatch(Patience(stepping_s=1.0, otherwise_s=100))
    slow, quick = page(9, 18.0, slowest_step_s=2.0), page(9, 18.0, slowest_step_s=0.5)
    assert watch.observe([slow, quick], 18.0 + 19) is None
    stall = watch.observe([slow, quick], 18.0 + 21)
    assert stall is not None
    assert "no progress for 21.0 s after step 9" in str(stall)
    assert "20.0 s are allowed" in str(stall)


def test_starting_and_saving_may_take_longer() -> None:
    watch = StallWatch(Patience(stepping_s=1.0, otherwise_s=100))
    assert watch.observe([page(0, 0.0, Phase.STARTING)], 99) is None
    assert watch.observe([page(5, 0.0, Phase.SAVING)], 99) is None
    assert watch.observe([page(5, 0.0, Phase.SAVING)], 101) is not None


def test_a_rank_that_compiles_and_those_that_wait_for_it_may_take_longer() -> None:
    watch = StallWatch(Patience(stepping_s=1.0, otherwise_s=100))
    compiling, waiting = replace(page(5, 1.0), is_compiling=True), page(5, 0.0)
    for now_s in range(2, 80):
        assert watch.observe([compiling, waiting], now_s) is None
    done = page(5, 79.5)  # the other rank has only now come to the collective
    assert watch.observe([done, waiting], 79.9) is None
    stall = watch.observe([page(6, 80.4), waiting], 80.6)
    assert stall is not None
    assert "80.0 s are allowed" in str(stall)  # a second after the last look at the compilation


def test_a_compilation_has_a_limit_too_and_so_has_waiting_for_one() -> None:
    watch = StallWatch(Patience(stepping_s=1.0, otherwise_s=100))
    compiling = replace(page(5, 10.0), is_compiling=True)
    stall = watch.observe([compiling, page(6, 20.0)], 111)
    assert stall is not None
    assert "(compiling; 100.0 s are allowed)" in str(stall)
    again = replace(page(5, 90.0), is_compiling=True)  # a second one, while rank 1 waits on
    stall = watch.observe([again, page(4, 0.0)], 101.5)
    assert stall is not None
    assert stall.local_rank == 1


def test_the_time_a_compilation_takes_is_not_learned_as_a_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ns = 10**9
    monkeypatch.setattr("time.monotonic_ns", lambda: now_ns)
    rank = ProgressPage(page_path(tmp_path, 0))
    rank.note(Phase.STEPPING, 1)
    for seconds, is_compiling in ((1, True), (60, False)):
        now_ns += seconds * 10**9
        rank.compiling(now=is_compiling)
        found = read_progress(tmp_path, 0)
        assert found is not None
        assert found.is_compiling == is_compiling
        assert found.phase is Phase.STEPPING
        assert found.at_s == pytest.approx(now_ns * 1e-9)
    now_ns += 10**9
    rank.note(Phase.STEPPING, 2)
    found = read_progress(tmp_path, 0)
    assert found is not None
    assert found.slowest_step_s == pytest.approx(1)
    rank.close()


def test_a_first_step_is_not_measured_by_the_floor() -> None:
    watch = StallWatch(Patience(stepping_s=1.0, otherwise_s=1000))
    assert watch.observe([page(1, 0.0, slowest_step_s=0.0)], 900) is None


def test_a_rank_that_is_seen_only_after_its_quick_steps_is_known_by_them() -> None:
    watch = StallWatch(Patience(stepping_s=1.0, otherwise_s=1000))
    assert watch.observe([page(40, 0.0, slowest_step_s=0.001)], 0.9) is None
    assert watch.observe([page(40, 0.0, slowest_step_s=0.001)], 1.1) is not None


def test_the_rank_that_is_furthest_behind_is_named_and_a_script_without_pages_never_stalls() -> (
    None
):
    watch = StallWatch(Patience(stepping_s=1.0))
    stall = watch.observe([page(8, 0.0), page(7, 0.5)], 10)
    assert stall is not None
    assert stall.local_rank == 1
    assert watch.observe([None, None], 1e9) is None
    assert watch.observe([page(8, 0.0, Phase.ENDED)], 1e9) is None


def test_a_rank_times_its_own_steps_and_forgets_a_slow_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ns = 10**9
    monkeypatch.setattr("time.monotonic_ns", lambda: now_ns)
    rank = ProgressPage(page_path(tmp_path, 0))

    def note_after(seconds: float, phase: Phase, step: int | None = None) -> float:
        nonlocal now_ns
        now_ns += int(seconds * 1e9)
        rank.note(phase, step)
        found = read_progress(tmp_path, 0)
        assert found is not None
        return found.slowest_step_s

    assert note_after(50, Phase.STEPPING, 1) == 0  # with all of its start in it
    assert note_after(2, Phase.STEPPING, 2) == pytest.approx(2)
    assert note_after(30, Phase.SAVING) == pytest.approx(2)
    assert note_after(30, Phase.STEPPING) == pytest.approx(2)
    assert note_after(3, Phase.STEPPING, 3) == pytest.approx(3)
    for step in range(4, 1000):
        slowest_s = note_after(0.1, Phase.STEPPING, step)
    assert slowest_s == pytest.approx(0.1)
    rank.close()


def test_the_same_mistake_at_the_same_step_is_not_tried_a_third_time() -> None:
    fault = "ValueError at train.py:31 in loss"
    mistake = End(Kind.FAILED, 7, fault=fault)
    assert decide(mistake, [], Budgets()).restart
    again = decide(mistake, [mistake], Budgets())
    assert not again.restart
    assert again.why == f"the same error came twice after step 7 ({fault}): it would come again"
    assert not decide(mistake, [mistake, End(Kind.PREEMPTED, 7)], Budgets()).restart
    elsewhere = End(Kind.FAILED, 7, fault="ValueError at train.py:40 in loss")
    assert decide(mistake, [elsewhere], Budgets()).restart
    assert decide(mistake, [End(Kind.FAILED, 6, fault=fault)], Budgets()).restart
    # what may pass (a connection, a device) has no fault, and keeps its three tries
    unknown = End(Kind.FAILED, 7)
    assert decide(unknown, [unknown], Budgets()).restart
    assert decide(mistake, [mistake], Budgets(restarts_anything=True)).restart

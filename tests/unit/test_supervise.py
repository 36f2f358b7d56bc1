"""Supervision, stepped by hand: no processes, no sleeping."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from drivetrain.record.session import Phase, ProgressPage, RankProgress, page_path, read_progress
from drivetrain.supervise.machine import Action, Machine, MachineState
from drivetrain.supervise.policy import (
    PREEMPTED_CODE,
    STALE_CODE,
    Budgets,
    Decision,
    End,
    EndKind,
    decide,
)
from drivetrain.supervise.settings import Settings
from drivetrain.supervise.stall import Patience, StallWatch

FAILED = End(EndKind.FAILED, 7)


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
    assert m.joined() == [Action.START]
    assert m.ended(End(EndKind.FINISHED, 100, 0)) == []
    assert m.state is MachineState.FINISHING
    assert m.others_ended() == [Action.LEAVE]
    assert (m.state, m.exit_code) == (MachineState.OVER, 0)


def test_a_failure_ends_the_workers_and_meets_again() -> None:
    m, _ = machine()
    m.joined()
    assert m.ended(FAILED) == [Action.KILL, Action.JOIN]
    assert m.state is MachineState.JOINING
    assert m.joined() == [Action.START]


def test_a_stall_writes_down_the_stacks_first() -> None:
    m, _ = machine()
    m.joined()
    assert m.ended(End(EndKind.STALLED, 7)) == [Action.DUMP_STACKS, Action.KILL, Action.JOIN]


def test_asked_to_stop_the_ranks_get_their_grace() -> None:
    m, clock = machine()
    m.joined()
    assert m.asked("SIGTERM") == [Action.ASK]
    clock.now_s = 29
    assert m.tick() == []
    assert m.ended(End(EndKind.PREEMPTED, 12, 75)) == [Action.KILL, Action.LEAVE]
    assert m.exit_code == 75


def test_out_of_grace_they_are_ended_and_the_code_still_says_resume_me() -> None:
    m, clock = machine()
    m.joined()
    m.asked("SIGTERM")
    clock.now_s = 31
    assert m.tick() == [Action.KILL, Action.LEAVE]
    assert (m.exit_code, m.state) == (75, MachineState.OVER)
    assert "30 s" in m.why


def test_asked_twice_means_now_but_a_scheduler_that_signals_everybody_asks_once() -> None:
    m, clock = machine()
    m.joined()
    m.asked("SIGTERM")
    assert m.asked("SIGTERM") == []
    clock.now_s = 2
    assert m.asked("SIGTERM") == [Action.KILL, Action.LEAVE]
    assert m.why == "a second SIGTERM ended it at once"


def test_a_second_request_counts_from_one_second_on_and_a_grace_ends_after_its_last() -> None:
    m, clock = machine()
    m.joined()
    clock.now_s = 100
    m.asked("SIGTERM")
    assert (m.asked_by, m.asked_s, m.deadline_s) == ("SIGTERM", 100, 130)
    clock.now_s = 100.9
    assert m.asked("SIGTERM") == []
    clock.now_s = 130
    assert m.tick() == [], "the last moment is still theirs"
    clock.now_s = 101
    assert m.asked("SIGTERM") == [Action.KILL, Action.LEAVE]
    assert m.asked("SIGTERM") == [], "it is over"
    assert m.exit_code == 75


def test_asked_while_meeting_it_leaves_at_once_and_is_not_started_after_all() -> None:
    m, _ = machine()
    assert m.asked("SIGUSR1") == [Action.LEAVE]
    assert (m.state, m.exit_code, m.asked_by) == (MachineState.OVER, 75, "SIGUSR1")
    m.state = MachineState.DRAINING  # the request came in the middle of the meeting
    assert m.joined() == [Action.LEAVE]
    assert (m.state, m.exit_code) == (MachineState.OVER, 75)


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (End(EndKind.PREEMPTED, 12, 75), 75),
        (End(EndKind.FINISHED, 12, 0), 0),
        (End(EndKind.FAILED, 12, 143), 75),  # by the signal itself
        (End(EndKind.FAILED, 12, 138), 75),
        (End(EndKind.FAILED, 12, 143, trains=False), 143),  # a script that saves nothing
        (End(EndKind.FAILED, 12, 137), 137),
        (End(EndKind.FAILED, 12, 1), 1),
    ],
)
def test_how_a_run_that_was_asked_to_stop_has_ended(end: End, code: int) -> None:
    m, _ = machine()
    m.joined()
    m.asked("SIGTERM")
    assert m.ended(end) == [Action.KILL, Action.LEAVE]
    assert (m.state, m.exit_code) == (MachineState.OVER, code)
    assert m.history == [end]


def test_what_is_not_started_again_leaves_with_its_code_and_its_reason() -> None:
    m, _ = machine()
    m.joined()
    assert m.ended(End(EndKind.FAILED, 7, 2)) == [Action.KILL, Action.LEAVE]
    assert (m.state, m.exit_code) == (MachineState.OVER, 2)
    m, _ = machine()
    m.joined()
    m.ended(End(EndKind.STALE, 7, 77))
    assert (m.exit_code, m.why) == (77, "another attempt has taken over the run")


def test_going_back_for_another_node_is_remembered_at_the_last_step() -> None:
    m, _ = machine()
    m.joined()
    m.ended(FAILED)
    m.joined()
    m.ended(End(EndKind.FINISHED, 100, 0))
    m.rejoin()
    assert m.history == [FAILED, End(EndKind.PEER, 7)]
    fresh, _ = machine()
    fresh.joined()
    fresh.ended(End(EndKind.FINISHED, 100, 0))
    fresh.rejoin()
    assert fresh.history == [End(EndKind.PEER, 0)]
    assert fresh.state is MachineState.JOINING


def test_time_that_passes_in_a_run_that_trains_means_nothing() -> None:
    m, clock = machine()
    m.joined()
    clock.now_s = 1e9
    assert m.tick() == []
    assert m.state is MachineState.RUNNING


def test_what_is_allowed_unless_somebody_says_otherwise() -> None:
    assert Budgets() == Budgets(100, 1000, 3, 3, restarts_anything=False)
    assert Patience() == Patience(60.0, 900.0)
    assert Machine(Budgets(), Clock()).grace_s == 30.0
    settings = Settings(("train.py",))
    assert (settings.is_python, settings.grace_s, settings.spares) == (True, 30.0, None)
    assert (settings.live, settings.warm_start) == (False, False)
    assert (settings.budgets, settings.patience) == (Budgets(), Patience())
    end = End(EndKind.FAILED, 7)
    assert (end.exit_code, end.trains, end.by_signal, end.fault) == (1, True, False, "")


def test_how_far_it_had_come() -> None:
    assert End(EndKind.FAILED, 0).where == "before its first step"
    assert End(EndKind.FAILED, 7).where == "after step 7"
    assert End(EndKind.START_UP, 7).where == "after resuming from step 7"


def test_each_kind_of_trouble_has_a_budget_of_its_own() -> None:
    tight = Budgets(failures=2, preemptions=1, start_ups=2, same_step=50)
    failed, stalled = End(EndKind.FAILED, 7), End(EndKind.STALLED, 8)
    preempted = End(EndKind.PREEMPTED, 7, 75)
    assert decide(failed, [stalled], tight).restart
    spent = decide(failed, [stalled, failed], tight)
    assert spent == Decision(False, "restart budget exhausted: 2 failures")
    assert decide(preempted, [failed] * 9, tight).restart
    assert "1 preemptions" in decide(preempted, [preempted], tight).why
    start_up = End(EndKind.START_UP, 5)
    assert decide(start_up, [failed, start_up], tight).restart
    why = decide(start_up, [failed, start_up, start_up], tight).why
    assert "2 failures before the first step" in why
    script = End(EndKind.FAILED, 0, trains=False)
    asked_for = replace(tight, restarts_anything=True)
    assert decide(script, [script], asked_for).restart
    assert not decide(script, [script, script], asked_for).restart
    assert decide(End(EndKind.RESIZED, 7), [failed] * 99, tight).restart
    assert decide(End(EndKind.FINISHED, 7, 0), [], tight) == Decision(False)


def test_a_crash_loop_is_of_one_kind_at_one_step_without_a_break() -> None:
    budgets = Budgets(failures=100, same_step=3)
    failed, stalled = End(EndKind.FAILED, 7), End(EndKind.STALLED, 7)
    for passing in (EndKind.RESIZED, EndKind.PEER, EndKind.PREEMPTED):
        history = [failed, End(passing, 7), stalled]
        assert not decide(failed, history, budgets).restart, "stalls count with failures"
    assert decide(failed, [failed], budgets).restart
    assert decide(failed, [failed, End(EndKind.FAILED, 8), failed], budgets).restart
    assert decide(failed, [failed, End(EndKind.START_UP, 7), failed], budgets).restart


def test_peers_at_another_step_or_failures_between_them_are_no_loop() -> None:
    peer, budgets = End(EndKind.PEER, 5), Budgets()
    assert not decide(peer, [peer] * 6, budgets).restart
    assert decide(peer, [*[End(EndKind.PEER, 4)] * 6, peer], budgets).restart
    assert decide(peer, [*[peer] * 3, FAILED, *[peer] * 3], budgets).restart


def test_after_a_stall_there_is_more_patience() -> None:
    watch = StallWatch(Patience(stepping_s=1.0, otherwise_s=100), leniency=2.0)
    assert watch.allowed_s(page(9, 0.0, slowest_step_s=0.001), 0.001) == 2.0
    assert watch.allowed_s(page(9, 0.0, slowest_step_s=3.0), 3.0) == 60.0
    assert watch.allowed_s(page(9, 0.0, Phase.SAVING), 3.0) == 200.0
    assert watch.observe([page(9, 0.0, slowest_step_s=3.0)], 60.0) is None, "not yet too long"
    stall = watch.observe([None, page(9, 0.0, Phase.SAVING)], 201.0)
    assert stall is not None
    assert (stall.local_rank, stall.silent_s, stall.allowed_s) == (1, 201.0, 200.0)
    assert "(saving; 200.0 s are allowed)" in str(stall)


def test_preempted_while_starting_it_still_says_resume_me() -> None:
    m, _ = machine()
    m.joined()
    m.asked("SIGTERM")
    m.ended(End(EndKind.START_UP, 0, 143))
    assert m.exit_code == 75


def test_a_node_that_finished_goes_back_for_one_that_failed() -> None:
    m, _ = machine()
    m.joined()
    m.ended(End(EndKind.FINISHED, 100, 0))
    assert m.rejoin() == [Action.KILL, Action.JOIN]
    assert m.joined() == [Action.START]


def test_a_transition_that_cannot_be_is_refused() -> None:
    m, _ = machine()
    with pytest.raises(RuntimeError, match="JOINING"):
        m.others_ended()


def test_nodes_that_could_not_meet_leave_so_that_they_are_started_again() -> None:
    m, _ = machine()
    m.could_not_join()
    assert (m.state, m.exit_code) == (MachineState.OVER, 75)


def test_who_comes_too_late_has_failed_unless_the_others_have_finished() -> None:
    codes = []
    for has_finished in (True, False):
        m, _ = machine()
        m.came_too_late(has_finished=has_finished)
        assert m.state is MachineState.OVER
        codes.append(m.exit_code)
    assert codes == [0, 1]


def test_budgets_are_separate() -> None:
    budgets = Budgets(failures=2, preemptions=5, start_ups=1)
    failures = [End(EndKind.FAILED, step) for step in (3, 9)]
    start_up = End(EndKind.START_UP, 0, by_signal=True)
    assert not decide(End(EndKind.FAILED, 20), failures, budgets).restart
    assert decide(End(EndKind.PREEMPTED, 20, 75), failures, budgets).restart
    assert decide(start_up, failures, budgets).restart
    assert not decide(start_up, [start_up], budgets).restart
    assert decide(End(EndKind.PEER, 20), failures * 50, budgets).restart


def test_a_rank_killed_while_starting_is_restarted_until_there_is_no_progress() -> None:
    killed = End(EndKind.START_UP, 0, 137, by_signal=True)
    assert decide(killed, [killed] * 2, Budgets()).restart
    spent = decide(killed, [killed] * 3, Budgets())
    assert spent == Decision(False, "restart budget exhausted: 3 failures before the first step")
    assert decide(killed, [*[killed] * 3, End(EndKind.FAILED, 9)], Budgets()).restart, "progress"
    assert decide(killed, [*[killed] * 3, End(EndKind.PREEMPTED, 4, 75)], Budgets()).restart
    again = [End(EndKind.FAILED, 9), killed, killed, End(EndKind.FAILED, 9), killed]
    assert not decide(killed, again, Budgets()).restart, "the same step again is no progress"
    assert not decide(killed, [], Budgets(start_ups=0)).restart


def test_a_killed_script_that_could_only_start_over_is_told_so() -> None:
    killed = End(EndKind.START_UP, 0, 137, trains=False, by_signal=True)
    assert decide(killed, [], Budgets()) == Decision(
        False,
        "no rank had called Trainer.fit or prepare, so the script could only start over; "
        "--max-restarts N allows that",
    )
    assert decide(replace(killed, by_signal=False), [], Budgets()) == Decision(False)


def test_two_tries_give_a_slow_line_as_much_time_as_three_doublings_would() -> None:
    watch = StallWatch(Patience(stepping_s=1.0, otherwise_s=100))
    allowed = []
    for _ in range(5):
        allowed.append(watch.allowed_s(page(3, 0.0, slowest_step_s=0.001), 0.001))
        watch.be_more_lenient()
    assert allowed == [1.0, 4.0, 16.0, 64.0, 64.0]


def test_a_hang_at_the_same_place_and_step_is_not_tried_a_third_time() -> None:
    hang = End(EndKind.STALLED, 7, fault="rank 1 at train.py:8 in loss")
    assert decide(hang, [], Budgets()).restart
    again = decide(hang, [hang, End(EndKind.RESIZED, 7)], Budgets())
    assert again == Decision(
        False,
        "it hung twice after step 7 at the same place (rank 1 at train.py:8 in loss), although "
        "it had longer the second time. If that line is only slow, raise --stall-timeout and "
        "--slow-timeout",
    )
    assert decide(hang, [replace(hang, step=6)], Budgets()).restart
    assert decide(hang, [replace(hang, fault="rank 0 at train.py:8 in loss")], Budgets()).restart
    unknown = replace(hang, fault="")  # a stopped process does not say where it is
    assert decide(unknown, [unknown], Budgets()).restart
    assert decide(hang, [hang], Budgets(restarts_anything=True)).restart


def test_an_error_of_its_own_before_the_first_step_ends_a_first_life_only() -> None:
    own_error = End(EndKind.START_UP, 0)
    assert not decide(own_error, [], Budgets()).restart
    assert decide(own_error, [FAILED], Budgets()).restart
    assert decide(End(EndKind.START_UP, 0, 137, by_signal=True), [], Budgets()).restart


def test_nodes_that_only_ever_see_the_others_end_do_not_go_on_for_ever() -> None:
    peer = End(EndKind.PEER, 0)
    assert decide(peer, [peer] * 5, Budgets()).restart
    decision = decide(peer, [peer] * 6, Budgets())
    assert not decision.restart
    assert "check that the nodes can reach each other" in decision.why


def test_a_crash_loop_at_one_step_stops_with_the_reason() -> None:
    history = [FAILED, End(EndKind.PREEMPTED, 7, 75), FAILED]
    decision = decide(FAILED, history, Budgets(failures=100))
    assert not decision.restart
    assert "after step 7: a crash loop" in decision.why
    assert decide(End(EndKind.FAILED, 8), history, Budgets(failures=100)).restart


@pytest.mark.parametrize("code", [2, 3, 4, 6, 7, 8])
def test_what_would_end_the_same_way_is_not_started_again(code: int) -> None:
    assert not decide(End(EndKind.FAILED, 7, code), [], Budgets()).restart


def test_a_script_without_steps_is_restarted_only_when_asked_for() -> None:
    end = End(EndKind.START_UP, 0, trains=False)
    assert not decide(end, [], Budgets()).restart
    assert decide(end, [], Budgets(restarts_anything=True)).restart


def page(
    step: int, at_s: float, phase: Phase = Phase.STEPPING, slowest_step_s: float = 0.1
) -> RankProgress:
    return RankProgress(step, phase, 1, at_s, slowest_step_s)


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
    mistake = End(EndKind.FAILED, 7, fault=fault)
    assert decide(mistake, [], Budgets()).restart
    again = decide(mistake, [mistake], Budgets())
    assert not again.restart
    assert again.why == f"the same error occurred twice after step 7 ({fault}); it would recur"
    assert not decide(mistake, [mistake, End(EndKind.PREEMPTED, 7)], Budgets()).restart
    elsewhere = End(EndKind.FAILED, 7, fault="ValueError at train.py:40 in loss")
    assert decide(mistake, [elsewhere], Budgets()).restart
    assert decide(mistake, [End(EndKind.FAILED, 6, fault=fault)], Budgets()).restart
    # what may pass (a connection, a device) has no fault, and keeps its three tries
    unknown = End(EndKind.FAILED, 7)
    assert decide(unknown, [unknown], Budgets()).restart
    assert decide(mistake, [mistake], Budgets(restarts_anything=True)).restart


def test_the_words_that_are_written_down_and_read_again() -> None:
    assert [kind.value for kind in EndKind] == [
        *("finished", "failed", "stalled", "failed while starting", "preempted"),
        *("another node's failure", "nodes joined or left", "replaced by another attempt"),
    ]
    states = [state.value for state in MachineState]
    assert states == ["joining", "running", "finishing", "draining", "over"]
    assert (PREEMPTED_CODE, STALE_CODE) == (75, 77)


def test_a_machine_begins_with_nothing_behind_it() -> None:
    new = Machine(Budgets(), Clock())
    assert (new.state, new.history, new.exit_code) == (MachineState.JOINING, [], 0)
    assert (new.why, new.asked_by, new.asked_s, new.deadline_s) == ("", "", 0.0, 0.0)


def test_settings_that_nobody_gave() -> None:
    settings = Settings(("train.py",))
    assert settings.is_python is True
    assert settings.budgets == Budgets()
    assert settings.patience == Patience()
    assert (settings.grace_s, settings.spares) == (30.0, None)
    assert settings.live is settings.warm_start is False


def test_a_decision_is_yes_or_no() -> None:
    for kind in EndKind:
        for code in (1, 2, STALE_CODE):
            for history in ([], [End(kind, 1, code)] * 100):
                assert type(decide(End(kind, 1, code), history, Budgets()).restart) is bool


def test_nodes_may_join_and_leave_as_often_as_they_like() -> None:
    assert decide(End(EndKind.RESIZED, 7), [End(EndKind.FAILED, 7)] * 100, Budgets()).restart

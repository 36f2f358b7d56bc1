"""`drivetrain learn`: the material is complete, and the checker tells right from wrong.

`make course` runs every attempt; these are one of each kind.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from drivetrain.core.errors import ConfigError
from drivetrain.learn import session
from drivetrain.learn.attempt import Shortcoming
from drivetrain.learn.exercises import EXERCISES, PHASES, Exercise, exercise_named, solution_scores
from drivetrain.learn.flow import Flow, RankLog, RecordedCall
from drivetrain.learn.folder import LearnerFolder
from drivetrain.learn.memory import SavedBytes
from drivetrain.learn.verdict import Score
from tests.learn.course import checked
from tests.learn.wrong_attempts import ATTEMPTS, WrongAttempt

_NAMES = [exercise.name for exercise in EXERCISES]
_CORE = (
    "trainer: mean of the ranks' means",
    "naive_allreduce: sends the sum before all ranks are received",
    "ring_allreduce: its buffer has the size of the chunk it sends",
    "ring_allreduce: whole tensors go round",
    "ring_allreduce: writes to a chunk that is being sent",
    "accumulation: divides by the number of micro-batches",
    "split_layer: no sum in the backward of f",
    "checkpoint: takes the newest folder",
    "zero3: autograd keeps the parameters",
    "hierarchical_allreduce: one all-reduce over all ranks",
    "expert_dispatch: restores the order with the wrong permutation",
)
_ON_PAPER: dict[str, tuple[str, ...]] = {
    # exercises of which a part is judged without any ranks, and the hints of that part
    "data_loader": (),
    "pipeline": ("held-too-many", "bubble", "incomplete-schedule", "not-gpipe", "order-differs"),
    "resume": ("same-every-epoch", "epoch-not-covered", "not-repeatable", "same-dropout"),
    "failure_detection": ("same-beat", "slow-as-dead", "dead-as-slow", "restarted", "begins-dead"),
    "stragglers": ("one-hiccup", "hidden", "nobody-is-slow", "missed", "all-slow", "too-eager"),
}


@pytest.mark.parametrize("exercise", EXERCISES, ids=_NAMES)
def test_material_is_complete(exercise: Exercise) -> None:
    assert "TODO" in exercise.template.read_text()
    assert "TODO" not in exercise.solution.read_text()
    assert any(name.startswith("step") for name in exercise.hints)
    assert Counter(attempt.exercise for attempt in ATTEMPTS)[exercise.name] >= 5
    guidelines = exercise.template.parent / "guidelines.md"
    assert exercise.name in guidelines.read_text()


@pytest.mark.parametrize("attempt", ATTEMPTS, ids=lambda attempt: attempt.name)
def test_every_wrong_attempt_can_be_written_and_its_hint_exists(
    attempt: WrongAttempt, tmp_path: Path
) -> None:
    compile(attempt.write(tmp_path).read_text(), "attempt", "exec")
    assert exercise_named(attempt.exercise).hints[attempt.hint]


def test_solutions_reach_the_byte_limit() -> None:
    scores = solution_scores()
    for name in ("ring_allreduce", "halving_allreduce"):
        share = next(v for what, v in scores[name].items() if what.startswith("bytes"))
        assert share >= 0.95


@pytest.mark.parametrize("name", _ON_PAPER)
def test_what_needs_no_ranks(name: str, tmp_path: Path) -> None:
    exercise = exercise_named(name)
    assert checked(exercise, exercise.template, "template", "todo").is_right
    for attempt in ATTEMPTS:
        if attempt.exercise == name and attempt.hint in (_ON_PAPER[name] or exercise.hints):
            row = checked(exercise, attempt.write(tmp_path), attempt.mistake, attempt.hint)
            assert row.is_right, (attempt.name, row.found)


@pytest.mark.slow
def test_core_on_real_ranks(tmp_path: Path) -> None:
    """Two solutions, and mistakes of several kinds."""
    for exercise in map(exercise_named, ("ring_allreduce", "zero1")):
        assert checked(exercise, exercise.solution, "solution", "passes").is_right
    by_name = {attempt.name: attempt for attempt in ATTEMPTS}
    for name in _CORE:
        attempt = by_name[name]
        exercise = exercise_named(attempt.exercise)
        row = checked(exercise, attempt.write(tmp_path), attempt.mistake, attempt.hint)
        assert row.is_right, (name, row.found)


@pytest.mark.slow
def test_deadlock_names_who_waits_for_whom(tmp_path: Path) -> None:
    attempt = next(a for a in ATTEMPTS if a.mistake == "all ranks send before they receive")
    with pytest.raises(Shortcoming) as told:
        exercise_named(attempt.exercise).check(attempt.write(tmp_path))
    assert told.value.hint == "deadlock"
    assert "rank 0 waits to send to rank 1" in told.value.found
    assert "rank 1 waits to send to rank 0" in told.value.found


def _log(rank: int, *calls: tuple[str, int, int]) -> RankLog:
    log = RankLog(rank)
    for index, (kind, peer, num_bytes) in enumerate(calls):
        log.calls[index] = RecordedCall(index, kind, peer, num_bytes, 0, 1, is_done=True)
        log.events += [("posted", index), ("done", index)]
    return log


def test_rounds_follow_from_what_a_rank_knew() -> None:
    chain = Flow(
        (
            _log(0, ("send", 1, 8)),
            _log(1, ("recv", 0, 8), ("send", 2, 8)),
            _log(2, ("recv", 1, 8)),
        )
    )
    assert chain.rounds() == [[(0, 1, 8)], [(1, 2, 8)]]
    into_one = Flow(
        (_log(0, ("recv", 1, 8), ("recv", 2, 8)), _log(1, ("send", 0, 8)), _log(2, ("send", 0, 8)))
    )
    assert into_one.rounds() == [[(1, 0, 8)], [(2, 0, 8)]]


def test_a_message_of_another_size_is_found() -> None:
    flow = Flow((_log(0, ("send", 1, 8)), _log(1, ("recv", 0, 16))))
    (found,) = flow.mismatched()
    assert (found[0], found[1], found[2].num_bytes, found[3].num_bytes) == (0, 1, 8, 16)


def test_score_is_a_share_of_the_limit() -> None:
    assert Score("bytes", 200, 100, "S").share == 0.5
    assert Score("bytes", 99, 100, "S").share == 1.0


def test_saved_bytes_come_and_go() -> None:
    weight = torch.ones(3, requires_grad=True)
    saved = SavedBytes([weight])
    with saved.counting():
        loss = (weight * torch.ones(3)).exp().sum()
        assert saved.now == 24  # the factor, and exp's result; the weight does not count
        loss.backward()
    del loss
    assert (saved.now, saved.peak) == (0, 24)


def test_a_test_script_is_copied_with_each_phase(tmp_path: Path) -> None:
    for phase in PHASES:
        session.start(phase, tmp_path, lambda _: None)
        script = tmp_path / f"test_phase{phase.number}.py"
        assert "removeprefix" in script.read_text()


def test_start_overwrites_nothing_and_a_solution_comes_after_a_try(tmp_path: Path) -> None:
    said: list[str] = []
    session.start(PHASES[0], tmp_path, said.append)
    folder = LearnerFolder.around(tmp_path / "phase1_data_parallel")
    exercise = EXERCISES[0]
    own = folder.file_of(exercise)
    own.write_text(own.read_text() + "# mine\n")
    session.start(PHASES[0], tmp_path, said.append)
    assert own.read_text().endswith("# mine\n")
    with pytest.raises(ConfigError, match="after a try"):
        session.give_solution(exercise, folder, said.append)
    assert not session.check_one(exercise, folder, said.append)
    session.give_solution(exercise, folder, said.append)
    assert (tmp_path / "solutions" / exercise.phase.folder / "data_loader.py").exists()
    said.clear()
    for _ in range(2):
        session.give_hint(exercise, folder, said.append)
    assert exercise.hints["step1"].split()[0] in "\n".join(said)
    said.clear()
    session.tell_progress(folder, said.append)
    assert f"0 of {len(EXERCISES)} exercises done, 0%" in said


def test_a_damaged_state_is_refused_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / ".learn.json").write_text("[")
    with pytest.raises(ConfigError, match="delete it"):
        LearnerFolder(tmp_path).state_of(EXERCISES[0])


def test_commands_outside_a_folder_say_how_to_start(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "drivetrain", "learn", "check"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert "drivetrain learn start 1" in result.stderr

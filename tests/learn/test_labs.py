"""The labs: how notes and runs are judged; the long tests start the clusters themselves."""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from drivetrain.core.errors import EnvironmentProblem
from drivetrain.learn import labs, session
from drivetrain.learn.attempt import Shortcoming
from drivetrain.learn.checks import lab_faults, lab_horovod, lab_ray, lab_slow
from drivetrain.learn.checks.lab_slow import Measured
from drivetrain.learn.exercises import LABS, LABS_FOLDER, Exercise, exercise_named, phase_numbered
from drivetrain.learn.folder import LearnerFolder
from drivetrain.learn.notes import Note, attempts_of, note, read_notes
from drivetrain.learn.training import new_model, on_one_process
from drivetrain.learn.verdict import Passed
from drivetrain.testing.hosts import hosts_available
from drivetrain.verify.drills.drill import DrillOutcome
from drivetrain.verify.drills.faults import Faults
from tests.learn.course import checked
from tests.learn.wrong_attempts import ATTEMPTS, WrongAttempt

PAGES = Path(__file__).parents[2] / "docs" / "labs"
_NEEDED = {"lab_ray": "ray", "lab_horovod": "horovod"}


@pytest.mark.parametrize("lab", LABS, ids=lambda lab: lab.name)
def test_material_is_complete(lab: Exercise) -> None:
    compile(lab.template.read_text(), lab.name, "exec")
    compile(lab.solution.read_text(), lab.name, "exec")
    assert any(name.startswith("step") for name in lab.hints)
    assert Counter(attempt.exercise for attempt in ATTEMPTS)[lab.name] >= 5
    assert f"## {lab.name}" in (lab.template.parent / "guidelines.md").read_text()
    pages = [page.read_text() for page in sorted(PAGES.glob("[1-4]*.md"))]
    (page,) = [page for page in pages if f"drivetrain learn check {lab.name}" in page]
    assert lab.solution.read_text() in page, "python -m tests.pages.labs"
    assert "Needs" in page


@pytest.mark.parametrize("lab", LABS, ids=lambda lab: lab.name)
def test_every_hint_that_a_check_names_exists(lab: Exercise) -> None:
    check = Path(lab_ray.__file__).with_name(f"{lab.name}.py").read_text()
    named = re.findall(r'Shortcoming\(\s*"([\w-]+)"', check + Path(labs.__file__).read_text())
    assert named
    missing = {name for name in named if name not in lab.hints}
    of_trainings = {"wrong-size", "one-node", "same-samples", "ranks-differ"}
    assert missing <= (of_trainings if lab.name in ("lab_faults", "lab_slow") else set())


def test_labs_are_started_by_their_name(tmp_path: Path) -> None:
    said: list[str] = []
    session.start(phase_numbered("labs"), tmp_path, said.append)
    assert not list(tmp_path.glob("test_phase*.py"))
    folder = LearnerFolder.around(tmp_path)
    assert all(folder.file_of(lab).is_file() for lab in LABS)
    said.clear()
    session.tell_progress(folder, said.append)
    assert f"labs      0 of {len(LABS)} done   {LABS_FOLDER.title}" in said
    assert folder.started == []  # no phase has


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labs, "hosts_available", lambda: "only root can make them")
    with pytest.raises(EnvironmentProblem, match="lab_slow: only root can make them; it"):
        exercise_named("lab_slow").check(exercise_named("lab_slow").solution)
    with pytest.raises(EnvironmentProblem, match="no_such_library is not installed; install it"):
        labs.require_library("lab_ray", "no_such_library", "install it")


def test_a_note_is_read_as_it_was_written(tmp_path: Path) -> None:
    for step in (1, 2):
        note(tmp_path, step, 0, 2, 1.5 / step, new_model())
    file = next((tmp_path / "notes").iterdir())
    file.write_text(file.read_text() + '{"step": 3, "ra')  # killed while it wrote
    found = read_notes(tmp_path)
    assert [(each.step, each.loss) for each in found] == [(1, 1.5), (2, 0.75)]
    assert found[0].weights == found[1].weights


def _notes(first: int, last: int, pid: int, time_s: float) -> list[Note]:
    """Two ranks on two hosts whose losses together are right."""
    reference, _ = on_one_process(last)
    return [
        Note(
            step=step,
            rank=rank,
            num_ranks=2,
            loss=reference[step].loss * (1.1 if rank else 0.9),
            weights=f"after {step}",
            host=f"h{rank + 1}",
            pid=pid + rank,
            time_s=time_s + step,
        )
        for step in range(first, last + 1)
        for rank in (0, 1)
    ]


_BEFORE, _AFTER = _notes(1, 13, 100, 0.0), _notes(11, lab_ray.NUM_STEPS, 200, 50.0)


def test_a_new_process_is_a_new_attempt() -> None:
    attempts = attempts_of([*_BEFORE, *_AFTER])
    assert [[each.step for each in attempt[0]][:: len(attempt[0]) - 1] for attempt in attempts] == [
        [1, 13],
        [11, 30],
    ]
    again = [replace(each, pid=100 + each.rank) for each in _AFTER]  # the number is used again
    assert len(attempts_of([*_BEFORE, *again])) == 2


def test_a_training_that_was_resumed_passes() -> None:
    passed = lab_ray.judged([*_BEFORE, *_AFTER], killed=13)
    assert "resumed with step 11" in passed.lines[1]
    assert passed.scores[0].found == 13 + 20


def _moved(notes: list[Note], **changes: object) -> list[Note]:
    return [replace(each, **changes) for each in notes]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("notes", "hint"),
    [
        ([], "nothing-noted"),
        (_BEFORE, "not-restarted"),
        ([*_BEFORE, *_notes(1, 30, 200, 50.0)], "from-the-beginning"),
        ([*_BEFORE, *_notes(11, 29, 200, 50.0)], "not-finished"),
        ([*_BEFORE, *(replace(n, loss=1.01 * n.loss) for n in _AFTER)], "state-lost"),
        ([*(replace(n, loss=1.01 * n.loss) for n in _BEFORE), *_AFTER], "wrong-training"),
        (_moved([*_BEFORE, *_AFTER], host="h1"), "one-node"),
        ([n for n in (*_BEFORE, *_AFTER) if n.rank == 0], "wrong-size"),
        (_moved(_BEFORE, num_ranks=1), "wrong-size"),
        ([replace(n, weights=f"{n.rank}") for n in _BEFORE], "ranks-differ"),
        ([replace(n, loss=float(n.step)) for n in _BEFORE], "same-samples"),
    ],
)
def test_what_goes_wrong_on_ray_is_told(notes: list[Note], hint: str) -> None:
    with pytest.raises(Shortcoming) as told:
        lab_ray.judged(notes, killed=13)
    assert told.value.hint == hint


def test_horovods_ranks_are_judged_alike_and_one_saves() -> None:
    notes = _notes(1, lab_horovod.NUM_STEPS, 100, 0.0)
    assert "only rank 0 saves" in lab_horovod.judged(notes, ["weights-0.pt"]).lines
    for saved in ([], ["weights-0.pt", "weights-1.pt"]):
        with pytest.raises(Shortcoming) as told:
            lab_horovod.judged(notes, saved)
        assert told.value.hint == "saved-by-all"
    with pytest.raises(Shortcoming) as told:
        lab_horovod.judged(notes[:-4], ["weights-0.pt"])
    assert told.value.hint == "not-finished"


_CURVE = list(range(1, lab_faults.NUM_STEPS + 1))
_KILLED = DrillOutcome(Faults().kill_at(12).faults)
_OTHER = ["the weights are not those of the uninterrupted run"]


@pytest.mark.parametrize(
    ("outcome", "num_done", "curve", "hint"),
    [
        (DrillOutcome((), list(_OTHER)), 40, _CURVE, "not-repeatable"),
        (DrillOutcome(_KILLED.faults, list(_OTHER)), 45, _CURVE, "state-lost"),
        (DrillOutcome(_KILLED.faults, ["not finished in time"]), 45, _CURVE, "not-recovered"),
        (_KILLED, 52, _CURVE, "steps-lost"),
        (_KILLED, 44, [*_CURVE[:12], *_CURVE[8:]], "curve"),
        (_KILLED, 44, _CURVE[1:], "curve"),
        (_KILLED, 44, [], "curve"),
    ],
)
def test_what_does_not_survive_is_told(
    outcome: DrillOutcome, num_done: int, curve: list[int], hint: str
) -> None:
    with pytest.raises(Shortcoming) as told:
        lab_faults.judge("a failure", outcome, num_done, curve)
    assert told.value.hint == hint


def test_what_survives_passes(tmp_path: Path) -> None:
    lab_faults.judge("a failure", _KILLED, 44, _CURVE)
    (tmp_path / "curve.csv").write_text("step,loss\n1,0.5\n2,0.4\n")
    assert lab_faults.curve_of(tmp_path / "curve.csv") == [1, 2]
    assert lab_faults.curve_of(tmp_path / "none.csv") == []


_LOSSES = {step: 1.0 / step for step in range(1, lab_slow.NUM_STEPS + 1)}
_FAST = Measured(0.02, {"productive": 0.9, "data_wait": 0.1}, _LOSSES, (20, 40, 60))


@pytest.mark.parametrize(
    ("own", "hint"),
    [
        (replace(_FAST, step_s=0.2, shares={"data_wait": 0.6, "productive": 0.4}), "data-wait"),
        (replace(_FAST, step_s=0.2, shares={"checkpoint": 0.5, "data_wait": 0.3}), "checkpoint"),
        (replace(_FAST, step_s=0.2, shares={"communication": 0.5}), "communication"),
        (replace(_FAST, step_s=0.2, shares={"productive": 0.9, "data_wait": 0.1}), "compute"),
        (replace(_FAST, losses={**_LOSSES, 7: 0.2}), "another-training"),
        (replace(_FAST, losses={1: 1.0}), "another-training"),
        (replace(_FAST, saved=(60,)), "not-saved"),
        (replace(_FAST, saved=(20, 40)), "not-saved"),
        (replace(_FAST, saved=()), "not-saved"),
    ],
)
def test_what_is_slow_or_wrong_is_told(own: Measured, hint: str) -> None:
    with pytest.raises(Shortcoming) as told:
        lab_slow.judged(own, _FAST)
    assert told.value.hint == hint


def test_as_fast_as_the_solution_is_fast_enough() -> None:
    for own in (_FAST, replace(_FAST, step_s=0.026), replace(_FAST, saved=tuple(range(1, 61)))):
        lab_slow.judged(own, _FAST)
    with pytest.raises(Shortcoming):
        lab_slow.judged(replace(_FAST, step_s=0.027), _FAST)


def test_a_script_that_fails_is_told_by_its_todo_or_its_last_lines() -> None:
    said = "Traceback …\nray.X: NotImplementedError: TODO 2: take this rank's part\n  more"
    assert labs.why_it_failed(said, 1).hint == "todo"
    assert "TODO 2: take this rank's part is" in labs.why_it_failed(said, 1).found
    crashed = labs.why_it_failed("one\n\nValueError: no such thing\n", 5)
    assert (crashed.hint, crashed.found) == ("crash", "exit code 5\none\nValueError: no such thing")


def _reason(lab: Exercise) -> str | None:
    library = _NEEDED.get(lab.name)
    if library is not None and importlib.util.find_spec(library) is None:
        return f"{library} is not installed"
    return hosts_available()


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("lab", LABS, ids=lambda lab: lab.name)
def test_the_solution_passes_on_a_cluster_and_the_template_does_not(
    lab: Exercise, capsys: pytest.CaptureFixture[str]
) -> None:
    if (reason := _reason(lab)) is not None:
        pytest.skip(reason)
    solution = checked(lab, lab.solution, "solution", "passes")
    with capsys.disabled():
        print(f"\n{lab.name}: solution {solution.found} in {solution.took_s:.0f} s")
        shown = solution.passed or Passed()
        for line in (*shown.lines, *map(str, shown.scores)):
            print(f"    {line}")
    assert solution.is_right
    template = checked(lab, lab.template, "template", "")
    with capsys.disabled():
        print(f"{lab.name}: template {template.found} in {template.took_s:.0f} s")
    assert template.found != "passes"


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "attempt", [each for each in ATTEMPTS if each.exercise.startswith("lab_")], ids=lambda a: a.name
)
def test_a_wrong_attempt_gets_its_hint(
    attempt: WrongAttempt, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lab = exercise_named(attempt.exercise)
    if (reason := _reason(lab)) is not None:
        pytest.skip(reason)
    row = checked(lab, attempt.write(tmp_path), attempt.mistake, attempt.hint)
    with capsys.disabled():
        print(f"\n{attempt.name}: {row.found} in {row.took_s:.0f} s")
    assert row.is_right, row.found

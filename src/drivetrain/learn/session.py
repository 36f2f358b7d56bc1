"""What `drivetrain learn` does, as lines of text: check, hint, solution, progress."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from drivetrain.core.errors import ConfigError, Problem
from drivetrain.learn.exercises import (
    EXERCISES,
    LABS,
    LABS_FOLDER,
    PHASES,
    Exercise,
    Phase,
    exercises_of,
    solution_scores,
)
from drivetrain.learn.folder import LearnerFolder
from drivetrain.learn.verdict import Passed
from drivetrain.learn.width import text_width

if TYPE_CHECKING:
    from drivetrain.learn.attempt import Shortcoming

Say = Callable[[str], None]
_BETWEEN = " " * 3


def list_exercises(say: Say) -> None:
    """All phases and exercises, and the labs."""
    for phase in (*PHASES, LABS_FOLDER):
        say(f"{phase.heading:7s}   {phase.title}")
        for exercise in exercises_of(phase):
            say(f"  {exercise.name:22s} {exercise.title}")
        say("")
    say("drivetrain learn start 1   copies the templates and guidelines of phase 1 to this folder")
    say(
        "drivetrain learn puzzle list   scripts with a bug, to be found with Drivetrain's own tools"
    )


def start(phase: Phase, here: Path, say: Say) -> None:
    """Copy a phase's files, and print what to do first."""
    folder = LearnerFolder(here)
    written = folder.start(phase)
    for path in written:
        say(f"wrote {path.relative_to(here)}")
    if not written:
        say("all files exist already; nothing was changed")
    first = exercises_of(phase)[0]
    say("")
    say(f"1. read   {phase.folder}/guidelines.md")
    say(f"2. write  {first.file}: replace each TODO")
    say(f"3. check  drivetrain learn check {first.name}")
    say("stuck?    drivetrain learn hint")


def check(exercises: Sequence[Exercise], folder: LearnerFolder, say: Say) -> bool:
    """Check each exercise; return whether all passed."""
    passed = [check_one(exercise, folder, say) for exercise in exercises]
    if len(passed) > 1:
        say(f"{sum(passed)} of {len(passed)} passed")
    if all(passed):
        _tell_next(exercises[-1].phase, folder, say)
    return all(passed)


def check_one(exercise: Exercise, folder: LearnerFolder, say: Say) -> bool:
    """Run one check, print what it found, and store the result."""
    from drivetrain.learn.attempt import Shortcoming  # imports torch, which hints do not need

    file = folder.file_of(exercise)
    state = folder.state_of(exercise)
    state.num_tries += file.read_text() != exercise.template.read_text()
    state.checked_at_s = time.time()
    begin_s = time.monotonic()
    try:
        passed = exercise.check(file)
    except Shortcoming as shortcoming:
        if shortcoming.hint != state.last_hint and shortcoming.hint in state.hints_given:
            state.hints_given.remove(shortcoming.hint)  # it is what "a hint for this" promises
        state.last_hint = shortcoming.hint
        state.is_passed = False
        folder.remember(exercise, state)
        _tell_shortcoming(exercise, shortcoming, say)
        return False
    state.is_passed, state.last_hint = True, ""
    for score in passed.scores:
        state.scores[score.what] = max(score.share, state.scores.get(score.what, 0.0))
    folder.remember(exercise, state)
    _tell_passed(exercise, passed, time.monotonic() - begin_s, say)
    return True


def _tell_next(phase: Phase, folder: LearnerFolder, say: Say) -> None:
    left = [each for each in exercises_of(phase) if not folder.state_of(each).is_passed]
    if left:
        say(f"next      {left[0].file}")
        say(f"          drivetrain learn check {left[0].name}")
        return
    later = [each for each in PHASES if each.number > phase.number]
    then = f"drivetrain learn start {later[0].number}" if later else "drivetrain learn progress"
    say(f"next      {phase.heading}: all passed; continue with {then}")


def _tell_shortcoming(exercise: Exercise, found: Shortcoming, say: Say) -> None:
    say(f"✗ {exercise.name}" + (f": {found.where}" if found.where else ""))
    _tell_block("expected", found.expected, say)
    _tell_block("found", found.found, say)
    if found.picture:
        _tell_picture("arrived", found.picture, say)
    say(f"  a hint for this: drivetrain learn hint {exercise.name}")
    say("")


def _tell_passed(exercise: Exercise, passed: Passed, took_s: float, say: Say) -> None:
    say(f"✓ {exercise.name} ({took_s:.0f} s)")
    for line in passed.lines:
        _tell_block("", line, say)
    own = solution_scores().get(exercise.name, {})
    for score in passed.scores:
        beside = f" (solution: {own[score.what]:.0%})" if score.what in own else ""
        _tell_block("score", f"{score}{beside}", say)
    if passed.picture:
        _tell_picture("messages", passed.picture, say)
    say("")


def _tell_block(label: str, text: str, say: Say) -> None:
    for line in text.splitlines():
        for piece in textwrap.wrap(line, text_width() - 12) or [""]:
            say(f"  {label:9s} {piece}".rstrip())
            label = ""


def _tell_picture(label: str, text: str, say: Say) -> None:
    """Break lines between messages, which are separated by three spaces."""
    for line in text.splitlines():
        first, *others = line.split(_BETWEEN)
        for message in others:
            if 12 + len(first) + len(_BETWEEN) + len(message) > text_width():
                say(f"  {label:9s} {first}".rstrip())
                label, first = "", " " * len("round  1")
            first += _BETWEEN + message
        say(f"  {label:9s} {first}".rstrip())
        label = ""


def next_exercise(folder: LearnerFolder) -> Exercise:
    """Return the first exercise of the started phases that has not passed."""
    for exercise in (*EXERCISES, *LABS):
        if folder.has_started(exercise.phase) and not folder.state_of(exercise).is_passed:
            return exercise
    waiting = [phase for phase in PHASES if not folder.has_started(phase)]
    remedy = f"drivetrain learn start {waiting[0].number}" if waiting else "nothing is left to do"
    rule = "every exercise that you started has passed"
    raise ConfigError([Problem("exercise", rule, remedy, has_value=False)])


def exercise_at_hand(folder: LearnerFolder) -> Exercise:
    """Return the exercise checked last; if it has passed, the next one."""
    both = (*EXERCISES, *LABS)
    last = max(both, key=lambda exercise: folder.state_of(exercise).checked_at_s)
    state = folder.state_of(last)
    return last if state.checked_at_s and not state.is_passed else next_exercise(folder)


def give_hint(exercise: Exercise, folder: LearnerFolder, say: Say) -> None:
    """Give the hint for what the last check found; when asked again, the next general one."""
    state = folder.state_of(exercise)
    order = [state.last_hint] if state.last_hint in exercise.hints else []
    order += [name for name in exercise.hints if name.startswith("step")]
    if not state.checked_at_s:
        say(f"(not checked yet; hints are better after `drivetrain learn check {exercise.name}`)")
    fresh = [name for name in order if name not in state.hints_given]
    if not fresh:
        state.hints_given = []
        fresh = order
        say("(no more hints; starting again)")
    name = fresh[0]
    state.hints_given.append(name)
    folder.remember(exercise, state)
    say(f"{exercise.name}:")
    for line in textwrap.wrap(exercise.hints[name], text_width() - 2):
        say(f"  {line}")
    say("")
    left = len(fresh) - 1
    say(f"{left} more: drivetrain learn hint {exercise.name}" if left else "this was the last hint")


def give_solution(exercise: Exercise, folder: LearnerFolder, say: Say) -> None:
    """Write the solution below `solutions/`, after a try."""
    if folder.state_of(exercise).num_tries == 0:
        remedy = (
            f"write a first part, even a rough one, then: drivetrain learn check {exercise.name}"
        )
        rule = "the solution is available only after a try"
        raise ConfigError([Problem("solution", rule, remedy, exercise.name)])
    target = folder.path / "solutions" / exercise.phase.folder / exercise.solution.name
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(exercise.solution.read_text())
    say(f"wrote {target.relative_to(folder.path)}; compare it with {exercise.file}")


def tell_progress(folder: LearnerFolder, say: Say) -> None:
    """Print what is done, with scores next to the solution's; one line for phases not started."""
    own = solution_scores()
    for phase in (*PHASES, LABS_FOLDER):
        exercises = exercises_of(phase)
        done = sum(folder.state_of(exercise).is_passed for exercise in exercises)
        say(f"{phase.heading:7s}   {done} of {len(exercises)} done   {phase.title}")
        for exercise in exercises if folder.has_started(phase) else ():
            state = folder.state_of(exercise)
            mark = "✓" if state.is_passed else " "
            tries = f"{state.num_tries} tries" if state.num_tries != 1 else "1 try"
            say(f"  [{mark}] {exercise.name:22s} {tries if state.num_tries else '':9s}".rstrip())
            for what, share in state.scores.items():
                solution = own.get(exercise.name, {}).get(what)
                beside = "" if solution is None else f", the solution {solution:.0%}"
                say(f"        {what}: {share:.0%} of the limit{beside}")
    num_done = sum(folder.state_of(exercise).is_passed for exercise in EXERCISES)
    say("")
    say(f"{num_done} of {len(EXERCISES)} exercises done, {num_done / len(EXERCISES):.0%}")

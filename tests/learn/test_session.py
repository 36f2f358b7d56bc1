"""What a learner reads: names, what comes next, narrow terminals, and mistakes told in full."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from drivetrain.core.errors import ConfigError
from drivetrain.learn import attempt, session
from drivetrain.learn.attempt import Outcome, Shortcoming
from drivetrain.learn.checks import all_reduce, measure
from drivetrain.learn.exercises import EXERCISES, PHASES, Exercise, exercise_named, phase_numbered
from drivetrain.learn.flow import Flow, RankLog, RankRecord, RecordedCall
from drivetrain.learn.folder import LearnerFolder
from drivetrain.learn.verdict import Passed

_DATA_LOADER, _TRAINER = EXERCISES[:2]


@pytest.fixture
def folder(tmp_path: Path) -> LearnerFolder:
    session.start(PHASES[0], tmp_path, lambda _: None)
    return LearnerFolder(tmp_path)


def _pass_at_once(monkeypatch: pytest.MonkeyPatch, passed: Passed | None = None) -> None:
    monkeypatch.setattr(Exercise, "check", lambda *_: passed or Passed())


def test_a_misspelt_exercise_gets_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="did you mean data_loader"):
        exercise_named("data_loder")
    with pytest.raises(ConfigError, match="drivetrain learn list"):
        exercise_named("zzzz")


def test_start_with_an_exercise_names_its_phase() -> None:
    with pytest.raises(ConfigError, match="drivetrain learn start 3"):
        phase_numbered("zero1")


def test_a_pass_names_what_comes_next(
    folder: LearnerFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    _pass_at_once(monkeypatch)
    said: list[str] = []
    session.check([_DATA_LOADER], folder, said.append)
    assert said[-2:] == [
        f"next      {_TRAINER.file}",
        "          drivetrain learn check trainer",
    ]
    for exercise in EXERCISES[1:7]:
        session.check([exercise], folder, said.append)
    assert said[-1] == "next      phase 1: all passed; continue with drivetrain learn start 2"


def test_an_untouched_template_is_no_try(folder: LearnerFolder) -> None:
    said: list[str] = []
    assert not session.check([_DATA_LOADER], folder, said.append)
    assert "still to be written: TODO 1 and 2 of rank_indices" in "\n".join(said)
    assert session.exercise_at_hand(folder) == _DATA_LOADER
    with pytest.raises(ConfigError, match="after a try"):
        session.give_solution(_DATA_LOADER, folder, said.append)


def test_progress_is_short_for_phases_not_started(folder: LearnerFolder) -> None:
    said: list[str] = []
    session.tell_progress(folder, said.append)
    text = "\n".join(said)
    assert "[ ] data_loader" in text
    assert "[ ] pipeline" not in text
    assert "phase 2   0 of 5 done   Memory and models" in text


def test_text_fits_a_narrow_terminal(
    folder: LearnerFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    picture = "round  1   " + "   ".join(f"{r} → {(r + 4) % 8} 32 B" for r in range(8))
    _pass_at_once(monkeypatch, Passed(["word " * 40], picture=picture))
    said: list[str] = []
    session.check([_DATA_LOADER], folder, said.append)
    session.give_hint(_DATA_LOADER, folder, said.append)
    drawn = [line for line in said if "→" in line]
    assert len(drawn) > 1
    assert "7 → 3 32 B" in drawn[-1]
    assert all(line[:12].strip() in ("", "messages") for line in drawn)
    assert max(map(len, said)) <= 60


def test_learn_commands_that_run_nothing_do_without_torch() -> None:
    code = "import sys, drivetrain.cli.learn; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def _waiting(rank: int, kind: str, peer: int | None, of: str = "") -> RankLog:
    return RankLog(rank, {0: RecordedCall(0, kind, peer, 8, 0, 22, elements=of)})


def test_a_peer_that_does_not_exist_is_said() -> None:
    flow = Flow((_waiting(0, "recv", 2), _waiting(1, "recv", 0), _waiting(2, "recv", 3)))
    assert (
        flow.waiting()[2]
        == "rank 2 waits to receive from rank 3 (8 B), line 22: there is no rank 3"
    )
    assert "no rank" not in flow.waiting()[0]


def test_a_collective_that_some_ranks_leave_out_is_drawn_in_words() -> None:
    flow = Flow((RankLog(0), _waiting(1, "all_reduce", None), _waiting(2, "all_reduce", None)))
    assert flow.picture() == "all_reduce of 8 B: 0 × on rank 0, 1 × on ranks 1, 2"


def _mismatch(sent: str, room: str) -> Shortcoming | None:
    send = RecordedCall(0, "send", 1, 32, 0, 29, elements=sent)
    receive = RecordedCall(0, "recv", 0, 16, 0, 30, elements=room)
    flow = Flow((RankLog(0, {0: send}), RankLog(1, {0: receive})))
    return attempt._size_mismatch(flow, Path("mine.py"), "")


def test_a_message_of_another_type_is_told_from_one_of_another_length() -> None:
    of_type = _mismatch("4 float64", "4 float32")
    assert of_type is not None
    assert of_type.hint == "type-mismatch"
    assert "32 B (4 float64)" in of_type.found
    of_length = _mismatch("4 float64", "2 float64")
    assert of_length is not None
    assert of_length.hint == "size-mismatch"


def _crashed(kind: str, text: str, tmp_path: Path, line: int = 1) -> Shortcoming:
    file = tmp_path / "template_ring.py"
    file.write_text("chunks[2]\n")
    records = [RankRecord(rank, {"": RankLog(rank)}, None, [], True) for rank in range(4)]
    records[1].sections["a tensor of 2 elements"] = RankLog(1)
    records[1].error = {"error": kind, "text": text, "line": line}
    told = attempt._why(Outcome([], records), file, "rank 1 failed")
    assert isinstance(told, Shortcoming)
    return told


def test_a_crash_says_in_which_case(tmp_path: Path) -> None:
    told = _crashed("IndexError", "tuple index out of range", tmp_path)
    assert told.where == "4 ranks, a tensor of 2 elements"
    assert told.hint == "crash"


def test_a_file_that_is_not_python_and_a_function_that_is_gone(tmp_path: Path) -> None:
    assert _crashed("SyntaxError", "expected ':'", tmp_path).hint == "syntax"
    text = "module 'learner_template_ring' has no attribute 'ring_all_reduce'"
    told = _crashed("AttributeError", text, tmp_path, line=0)
    assert told.hint == "renamed"
    assert "no function ring_all_reduce" in told.found
    assert "learner_" not in told.found


def test_hints_of_any_exercise_exist() -> None:
    for exercise in EXERCISES:
        assert {"syntax", "renamed", "type-mismatch"} <= set(exercise.hints)


def test_an_endless_loop_is_told_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("x = 1\nwhile x:\n    pass\n")
    records = [RankRecord(0, {"": RankLog(0)}, None, [], True)]
    outcome = Outcome([], records, busy_lines={0: 2})
    told = attempt._why(outcome, file, "rank 0 was still running")
    assert isinstance(told, Shortcoming)
    assert told.hint == "endless"
    assert "rank 0 was still computing\nmine.py:2: while x:" in told.found


def test_one_is_singular() -> None:
    assert all_reduce._section(1) == "a tensor of 1 element"
    assert all_reduce._section(2) == "a tensor of 2 elements"
    assert attempt.num_ranks_in_words(1) == "1 rank"


def test_a_line_that_falls_is_no_bandwidth() -> None:
    assert "-" not in measure._own_link(1e-3, -1e9)
    assert "longer messages took no longer" in measure._own_link(1e-3, -1e9)
    assert "50 µs and 2000 MB/s" in measure._own_link(5e-5, 2e9)


@pytest.mark.slow
@pytest.mark.parametrize("after_s", [0.0, 0.5])
def test_an_interrupted_check_is_short_and_leaves_nothing(
    folder: LearnerFolder, after_s: float
) -> None:
    """Ctrl-C while the ranks' imports begin or run, and everything of its group hears it."""
    attempt = next(folder.path.rglob("template_naive_allreduce.py"))
    attempt.write_text("import time\n\ntime.sleep(50)  # nobody's check is through before it\n")
    check = subprocess.Popen(
        [sys.executable, "-m", "drivetrain", "learn", "check", "naive_allreduce"],
        cwd=folder.path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # tests that run in the background ignore it, and what they start would, too
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )
    children = Path(f"/proc/{check.pid}/task/{check.pid}/children")
    deadline_s = time.monotonic() + 60
    while "multiprocessing.forkserver" not in _command_lines(children.read_text().split()):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    time.sleep(after_s)
    os.killpg(check.pid, signal.SIGINT)
    said, _ = check.communicate(timeout=60)
    assert (said, check.returncode) == ("interrupted: this check does not count\n", 130)
    assert folder.state_named("naive_allreduce").checked_at_s == 0


def _command_lines(pids: list[str]) -> str:
    found = []
    for pid in pids:
        with suppress(OSError):
            found.append(Path(f"/proc/{pid}/cmdline").read_text())
    return " ".join(found)


def test_what_a_check_finds_anew_gets_its_hint_again(
    folder: LearnerFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = iter(["gaps", "duplicates", "gaps", "gaps"])

    def fail(*_: object) -> Passed:
        raise Shortcoming(next(found), "right", "wrong")

    monkeypatch.setattr(Exercise, "check", fail)
    given = []
    for _ in range(4):
        said: list[str] = []
        session.check([_DATA_LOADER], folder, lambda _: None)
        session.give_hint(_DATA_LOADER, folder, said.append)
        given.append(said[1].strip())
    begins = [_DATA_LOADER.hints[name][:20] for name in ("gaps", "duplicates", "gaps", "step1")]
    assert [text[:20] for text in given] == begins


def test_a_collective_that_waits_is_told_as_one() -> None:
    flow = (RankLog(0), _waiting(1, "all_reduce", None))
    records = [RankRecord(log.rank, {"": log}, None, [], True) for log in flow]
    told = attempt._why(Outcome([], records), Path("mine.py"), "rank 1 was still running")
    assert isinstance(told, Shortcoming)
    assert told.hint == "deadlock"
    assert (
        told.expected
        == "every rank calls each collective: it completes when the last rank has called it"
    )

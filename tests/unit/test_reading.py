from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from drivetrain.core.errors import ConfigError
from drivetrain.record import Recorder, RunDirectory
from drivetrain.record.reading import duration_s, is_redone, open_run, own_s
from drivetrain.record.step_file import FIELDS, HEADER_BYTES, StepTimes, StepWriter, header


def times(step: int, start_s: float = 0.0, compute_s: float = 0.5, **other: Any) -> StepTimes:
    return StepTimes(step, start_s, 0.125, compute_s, 0.25, 0.0625, 0.0, 0.03125, **other)


def write(run: Path, rank: int, steps: list[StepTimes], attempt: int = 1) -> None:
    writer = StepWriter(run / "events" / f"{rank:05d}.steps", attempt)
    writer.write(steps)
    writer.close()


def test_what_a_recorder_writes_is_what_is_read(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    before_s = time.time()
    with Recorder(run.events(3), attempt=7) as recorder:
        recorder.step(times(1, start_s=time.perf_counter(), flags=1))
        recorder.step(times(2, start_s=time.perf_counter()))
    table = open_run(tmp_path).steps(3)
    assert table["step"].tolist() == [1, 2]
    assert table["attempt"].tolist() == [7, 7]
    assert table["flags"].tolist() == [1, 0]
    assert own_s(table).tolist() == [0.625, 0.625]
    assert duration_s(table).tolist() == [0.96875, 0.96875]
    assert before_s - 1 < table["start_s"][0] <= table["start_s"][1] < time.time() + 1


def test_a_record_takes_forty_bytes_and_the_header_says_what_is_in_it(tmp_path: Path) -> None:
    write(tmp_path, 0, [times(step) for step in range(1, 101)])
    path = tmp_path / "events/00000.steps"
    assert path.stat().st_size == HEADER_BYTES + 100 * 40
    assert json.loads(path.read_bytes()[:HEADER_BYTES])["fields"] == [list(f) for f in FIELDS]
    assert len(header()) == HEADER_BYTES


def test_a_reader_goes_by_the_header_and_not_by_its_own_idea(tmp_path: Path) -> None:
    document = {"fields": [["step", "<u8"], ["start_s", "<f8"], ["brand_new_s", "<f4"]]}
    records = np.zeros(2, [("step", "<u8"), ("start_s", "<f8"), ("brand_new_s", "<f4")])
    records["step"] = [4, 5]
    first = json.dumps(document).encode().ljust(HEADER_BYTES - 1) + b"\n"
    (tmp_path / "events").mkdir()
    (tmp_path / "events/00000.steps").write_bytes(first + records.tobytes())
    assert open_run(tmp_path).steps(0)["step"].tolist() == [4, 5]


def test_a_half_written_end_is_passed_over_and_cut_off_by_the_next_attempt(tmp_path: Path) -> None:
    write(tmp_path, 0, [times(1), times(2)])
    path = tmp_path / "events/00000.steps"
    path.write_bytes(path.read_bytes()[:-7])
    assert open_run(tmp_path).steps(0)["step"].tolist() == [1]
    write(tmp_path, 0, [times(2), times(3)], attempt=2)
    assert open_run(tmp_path).steps(0)["step"].tolist() == [1, 2, 3]
    assert open_run(tmp_path).steps(0)["attempt"].tolist() == [1, 2, 2]


def test_half_a_line_does_not_swallow_the_next_attempts_first_event(tmp_path: Path) -> None:
    path = tmp_path / "events/00000.jsonl"
    for attempt in (1, 2):
        with Recorder(path, attempt=attempt) as recorder:
            recorder.instant("attempt", number=attempt)
        path.write_bytes(path.read_bytes() + b'{"kind": "instant", "na')
    assert [e.values["number"] for e in open_run(tmp_path).events(0)] == [1, 2]


@pytest.mark.parametrize(
    ("steps", "redone"),
    [
        ([1, 2, 3], [False, False, False]),
        ([1, 2, 3, 2, 3, 4], [False, True, True, False, False, False]),
        ([1, 2, 3, 4, 3, 4, 2, 3], [False, True, True, True, True, True, False, False]),
        ([5], [False]),
        ([], []),
    ],
)
def test_which_steps_were_done_again(steps: list[int], redone: list[bool]) -> None:
    table = np.zeros(len(steps), np.dtype(list(FIELDS)))
    table["step"] = steps
    assert is_redone(table).tolist() == redone


def test_a_matrix_has_the_last_word_on_each_step_and_gaps_where_there_is_none(
    tmp_path: Path,
) -> None:
    write(tmp_path, 0, [times(1), times(2), times(3)])
    write(tmp_path, 0, [times(2, compute_s=1.5), times(3), times(4)], attempt=2)
    write(tmp_path, 1, [times(1), times(2)])
    run = open_run(tmp_path)
    assert run.ranks == (0, 1)
    matrix = run.matrix("own_s")
    assert matrix.steps.tolist() == [1, 2, 3, 4]
    assert matrix.values[0].tolist() == [0.625, 1.625, 0.625, 0.625]
    assert matrix.values[1].tolist()[:2] == [0.625, 0.625]
    assert np.isnan(matrix.values[1][2:]).all()
    both = run.matrices(["own_s", "duration_s"], ranks=[1])
    assert both["duration_s"].values.shape == (1, 4)


def test_only_the_new_end_of_a_growing_file_is_read(tmp_path: Path) -> None:
    run = open_run(_begun(tmp_path))
    steps, events = run.follow_steps(0), run.follow_events(0)
    assert len(steps.read_new()) == 0
    assert events.read_new() == []
    write(tmp_path, 0, [times(1)])
    line = b'{"kind": "scalars", "step": 1, "time_s": 5.0, "values": {"train/loss": "nan"}}\n'
    path = tmp_path / "events/00000.jsonl"
    path.write_bytes(line + line[:20])
    assert steps.read_new()["step"].tolist() == [1]
    assert [e.step for e in events.read_new()] == [1]
    write(tmp_path, 0, [times(2), times(3)])
    path.write_bytes(line + line)
    assert steps.read_new()["step"].tolist() == [2, 3]
    assert np.isnan([e.values["train/loss"] for e in events.read_new()]).all()
    assert events.read_new() == []
    assert run.last_steps(0, 2)["step"].tolist() == [2, 3]


def test_the_tail_of_a_long_file_comes_without_its_beginning(tmp_path: Path) -> None:
    with Recorder(tmp_path / "events/00000.jsonl") as recorder:
        for step in range(5000):
            recorder.instant("saved", step=step)
    run = open_run(tmp_path)
    assert [e.step for e in run.tail(0, 3)] == [4997, 4998, 4999]
    assert len(run.tail(0, 10_000)) == 5000


def test_a_scalar_that_was_logged_again_counts_once(tmp_path: Path) -> None:
    with Recorder(tmp_path / "events/00000.jsonl") as recorder:
        for step, value in ((10, 3.0), (20, 2.0), (10, 3.5), (20, 2.5)):
            recorder.scalars(step, {"train/loss": value})
    loss = open_run(tmp_path).scalars()["train/loss"]
    assert loss.steps.tolist() == [10, 20]
    assert loss.values.tolist() == [3.5, 2.5]


def test_attempts_say_when_and_why(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.begin_attempt(1, {"started_s": 5.0, "world_size": 2, "resumed_step": 3})
    error = "Traceback …\nValueError: no"
    run.end_attempt(
        1,
        {"kind": "failed", "time_s": 9.0, "step": 7, "failures": [{"rank": 1, "error": error}]},
    )
    run.begin_attempt(2, {"started_s": 12.0, "launched_s": 10.0, "command_s": 4.0})
    first, second = open_run(tmp_path).attempts()
    assert (first.launched_s, first.end_s, first.kind) == (5.0, 9.0, "failed")
    assert first.reason == "rank 1: ValueError: no"
    assert (first.resumed_step, first.last_step, first.world_size) == (3, 7, 2)
    assert (second.command_s, second.launched_s, second.started_s) == (4.0, 10.0, 12.0)
    assert (second.end_s, second.kind, second.reason) == (None, None, "")


def test_a_run_far_away_reads_like_one_nearby(tmp_path: Path) -> None:
    write(tmp_path, 0, [times(1), times(2)])
    with Recorder(tmp_path / "events/00001.jsonl") as recorder:
        recorder.instant("attempt", number=1)
    files = fsspec.filesystem("memory")
    files.put(str(tmp_path), "/far/away", recursive=True)
    try:
        run = open_run("memory://far/away")
        assert run.ranks == (0, 1)
        assert run.steps(0)["step"].tolist() == [1, 2]
        assert run.last_steps(0, 1)["step"].tolist() == [2]
        assert [e.name for e in run.tail(1)] == ["attempt"]
        assert run.follow_steps(0).read_new()["step"].tolist() == [1, 2]
        assert run.attempts() == ()
    finally:
        files.rm("/far", recursive=True)


@pytest.mark.parametrize("name", ["nowhere", "empty", "memory://nowhere/at/all"])
def test_what_is_no_run_is_said_so(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/notes.txt").touch()
    address = name if "://" in name else tmp_path / name
    expected = r"RUN = .*: (no such directory|not a run directory); give a"
    with pytest.raises(ConfigError, match=expected):
        open_run(address)


def test_reading_needs_no_torch() -> None:
    code = "import sys, drivetrain.record.reading; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_looking_at_a_run_loads_neither_the_config_nor_studies() -> None:
    """They take as long to load as a run takes to read."""
    code = (
        "import sys, drivetrain.cli.looking;"
        " print(*{'torch', 'drivetrain.config.schema', 'drivetrain.tune.space'} & {*sys.modules})"
    )
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert found.stdout.split() == []


def _begun(path: Path) -> Path:
    (path / "events").mkdir()
    return path

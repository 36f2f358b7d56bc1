from __future__ import annotations

import io
import json
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from drivetrain.record import Recorder, RunDirectory
from drivetrain.record.progress import PlainLines, Snapshot, make_progress
from drivetrain.record.recorder import Outbox
from drivetrain.record.sinks import Outcome, Scalars, make_sink


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_spans_scalars_and_instants_are_one_object_per_line(tmp_path: Path) -> None:
    path = tmp_path / "events" / "00000.jsonl"
    with Recorder(path) as recorder:
        start_s = time.perf_counter()
        recorder.spans(3, ("step", start_s, start_s + 0.25))
        recorder.scalars(3, {"train/loss": 1.5})
        recorder.instant("run_end", steps=3)
    span, scalars, instant = lines(path)
    assert span["name"] == "step"
    assert span["duration_s"] == 0.25
    assert abs(float(str(span["start_s"])) - time.time()) < 5
    assert scalars["values"] == {"train/loss": 1.5}
    assert instant["fields"] == {"steps": 3}


@pytest.mark.alone
def test_handing_over_an_event_costs_microseconds(tmp_path: Path) -> None:
    with Recorder(tmp_path / "e.jsonl") as recorder:
        costs = []
        for block in range(20):
            start_s = time.perf_counter()
            for _ in range(500):
                recorder.spans(block, ("step", 0.0, 1.0))
            costs.append((time.perf_counter() - start_s) / 500)
    assert sorted(costs)[10] < 10e-6
    assert len(lines(tmp_path / "e.jsonl")) == 10_000


class Stuck:
    name = "stuck"
    every_s = 0.5

    def __init__(self) -> None:
        self.release = threading.Event()

    def write(self, batch: Sequence[Scalars]) -> None:
        self.release.wait(30)

    def close(self, outcome: Outcome) -> None:
        pass


@pytest.mark.alone
def test_a_stalled_sink_does_not_hold_the_step_or_the_event_file(tmp_path: Path) -> None:
    sink = Stuck()
    recorder = Recorder(tmp_path / "e.jsonl", [sink])
    start_s = time.perf_counter()
    for step in range(1000):
        recorder.scalars(step, {"x": 1.0})
    assert time.perf_counter() - start_s < 0.5
    sink.release.set()
    recorder.close()
    assert len(lines(tmp_path / "e.jsonl")) == 1000


class Broken(Stuck):
    name = "broken"

    def write(self, batch: Sequence[Scalars]) -> None:
        raise OSError("no space left")


def test_a_failing_sink_is_switched_off_and_said_once(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="sink broken failed and is switched off") as caught:
        recorder = Recorder(tmp_path / "e.jsonl", [Broken()])
        for step in range(3):
            recorder.scalars(step, {"x": 1.0})
            time.sleep(0.6)
        recorder.close()
    assert len(caught) == 1
    assert len(lines(tmp_path / "e.jsonl")) == 3


def test_a_full_outbox_counts_what_it_drops() -> None:
    gate = threading.Event()
    outbox: Outbox[int] = Outbox("slow", lambda _: None, every_s=60, capacity=2)
    for item in range(5):
        outbox.put(item)
    gate.set()
    with pytest.warns(UserWarning, match="3 items dropped"):
        outbox.close()


def test_a_name_that_is_taken_gets_a_number(tmp_path: Path) -> None:
    first = RunDirectory.create(tmp_path, "digits")
    second = RunDirectory.create(tmp_path, "digits")
    assert (first.path.name, second.path.name) == ("digits", "digits-2")


def test_attempts_are_read_back_in_order(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "digits")
    assert run.next_attempt() == 1
    run.begin_attempt(1, {"host": "a", "started_s": 5.0})
    run.end_attempt(1, {"kind": "failed"})
    run.begin_attempt(2, {"host": "b", "started_s": 9.0})
    assert [(a.number, a.start["host"], dict(a.end)) for a in run.attempts()] == [
        (1, "a", {"kind": "failed"}),
        (2, "b", {}),
    ]
    assert run.next_attempt() == 3
    assert run.failures()[0] == 1


def test_how_long_attempts_lasted_is_told_by_one_clock_each(tmp_path: Path) -> None:
    run, now_s = RunDirectory(tmp_path), time.time()
    off_s = 600.0  # the clock of b is ten minutes ahead
    run.begin_attempt(1, {"host": "a", "started_s": now_s - 500})
    run.end_attempt(1, {"host": "a", "kind": "failed", "time_s": now_s - 400})
    run.begin_attempt(2, {"host": "b", "started_s": now_s - 300 + off_s})
    run.end_attempt(2, {"host": "b", "kind": "failed", "time_s": now_s - 250 + off_s})
    run.begin_attempt(3, {"host": "a", "started_s": now_s - 200})
    run.end_attempt(3, {"host": "b", "kind": "failed", "time_s": now_s - 150 + off_s})
    run.begin_attempt(4, {"host": "b", "started_s": now_s - 50 + off_s})
    assert run.failures() == (3.0, 150.0), "how long the third lasted nobody can tell"


def test_tensorboard_reads_back_what_the_sink_wrote(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    directory = RunDirectory.create(tmp_path, "tb")
    with Recorder(None, [make_sink("tensorboard", directory)]) as recorder:
        for step in range(1, 4):
            recorder.scalars(step, {"train/loss": 1.0 / step})
    reader = EventAccumulator(str(directory.tensorboard))
    reader.Reload()
    events = reader.Scalars("train/loss")
    assert [event.step for event in events] == [1, 2, 3]
    assert [event.value for event in events] == pytest.approx([1.0, 0.5, 1 / 3])


def test_the_jsonl_sink_writes_one_flat_object_per_step(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path, "j")
    with Recorder(None, [make_sink("jsonl", directory)]) as recorder:
        recorder.scalars(7, {"train/loss": 2.0})
    (line,) = lines(directory.scalars)
    assert (line["step"], line["train/loss"]) == (7, 2.0)


def snapshot(step: int) -> Snapshot:
    return Snapshot(step, 500, 2.34567, 3e-4, 0.81, 1234.5, 56_789.0, 125.0)


def test_plain_lines_say_everything(capsys: pytest.CaptureFixture[str]) -> None:
    PlainLines(min_interval_s=0).show(snapshot(120))
    assert capsys.readouterr().out == (
        "step 120/500  loss 2.3457  lr 3.00e-04  grad norm 0.810  samples/s 1.2k  "
        "tokens/s 56.8k  ETA 2:05\n"
    )


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    logger = logging.getLogger("drivetrain")
    level, handlers = logger.level, list(logger.handlers)
    yield logger
    logger.setLevel(level)
    logger.handlers[:] = handlers


def test_lines_below_the_loggers_level_are_dropped(
    logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    logger.setLevel(logging.WARNING)
    progress = PlainLines(min_interval_s=0)
    progress.show(snapshot(120))
    progress.say("warning: the disk is nearly full")
    assert capsys.readouterr().out == "warning: the disk is nearly full\n"


def test_a_handler_of_the_users_gets_the_lines_instead(
    logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(logging.Formatter("%(name)s %(levelname)s %(message)s"))
    logger.addHandler(handler)
    PlainLines().say("a path with 100% of it")
    PlainLines().say("warning: slow")
    lines = ["drivetrain INFO a path with 100% of it", "drivetrain WARNING warning: slow"]
    assert written.getvalue().splitlines() == lines
    assert capsys.readouterr().out == ""


def test_plain_lines_do_not_flood_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    progress = PlainLines(min_interval_s=60)
    for step in range(1, 501):
        progress.show(snapshot(step))
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in shown] == ["1/500", "500/500"]


def test_only_rank_0_speaks(capsys: pytest.CaptureFixture[str]) -> None:
    make_progress("auto", 10, is_main=False).say("hello")
    assert capsys.readouterr().out == ""

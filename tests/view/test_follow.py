from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from benchmarks.reading.made_run import MadeRun, make_run
from drivetrain.record.reading import open_run
from drivetrain.record.reading.files import LocalSource
from drivetrain.record.step_file import FIELDS, header
from drivetrain.view.describe import view_whole
from drivetrain.view.follow import RunFollower
from drivetrain.view.page import report_page

MADE = MadeRun(num_ranks=4, num_steps=400, save_steps=50, slow_rank=2)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "made"
    make_run(path, MADE)
    return path


def test_a_whole_run_is_read_into_what_is_shown(run: Path) -> None:
    view = view_whole(open_run(run), time.time())
    assert (view.name, view.state, view.step, view.total_steps) == ("made", "finished", 400, 400)
    assert [(a.kind, a.first_step, a.last_step) for a in view.attempts] == [
        ("failed", 1, 236),
        ("finished", 201, 400),
    ]
    assert view.attempts[0].what == "rank 1: killed by signal 9"
    assert [(c.step, c.attempt) for c in view.checkpoints][3:6] == [(200, 1), (250, 2), (300, 2)]
    assert view.scalar("train/loss").steps.tolist() == list(range(10, 401, 10))
    assert view.config["optimization.learning_rate"] == ("0.0003", "file: made.yaml")
    assert view.ledger is not None
    assert view.ledger.wall_s == pytest.approx(view.wall_s, rel=1e-3)
    over_time_s = sum(float(each.sum()) for each in view.ledger.over_time.values())
    assert over_time_s == pytest.approx(view.wall_s, rel=1e-3)
    assert view.ledger.seconds["redone"] > 0
    assert view.ranks is not None
    late = view.ranks.seconds["compute"][:, -1]
    assert late.argmax() == 2


def test_following_ends_where_reading_whole_does(run: Path) -> None:
    now_s = time.time()
    followed, whole = RunFollower(open_run(run)).look(now_s), view_whole(open_run(run), now_s)
    assert followed.attempts == whole.attempts
    assert followed.checkpoints == whole.checkpoints
    assert followed.ledger is not None
    assert whole.ledger is not None
    assert dict(followed.ledger.seconds) == pytest.approx(dict(whole.ledger.seconds))
    assert followed.recent is not None
    assert int(np.argmax(followed.recent.own_s)) == 2


class CountingSource(LocalSource):
    """How much is read."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.num_bytes = 0

    def read(
        self, name: str, start: int = 0, length: int | None = None, most: int = 1 << 30
    ) -> bytes:
        data = super().read(name, start, length, most)
        if name.startswith("events/"):
            self.num_bytes += len(data)
        return data


def append_steps(path: Path, steps: range) -> None:
    records = np.zeros(len(steps), np.dtype(list(FIELDS)))
    records["step"], records["attempt"] = list(steps), 1
    records["start_s"] = 1000.0 + np.array(steps) * 0.1
    records["compute_s"] = 0.1
    with path.open("ab") as file:
        file.write(records.tobytes())


def test_each_look_reads_only_what_is_new(tmp_path: Path) -> None:
    events = tmp_path / "events"
    events.mkdir()
    (tmp_path / "attempts/0001").mkdir(parents=True)
    start = {"started_s": 1000.0, "world_size": 1, "host": "here"}
    (tmp_path / "attempts/0001/start.json").write_text(json.dumps(start))
    (events / "00000.steps").write_bytes(header())
    append_steps(events / "00000.steps", range(1, 5001))
    (events / "00000.jsonl").write_text(_loss_line(5000, 2.0))
    source = CountingSource(tmp_path)
    run = open_run(tmp_path)
    object.__setattr__(run, "source", source)
    follower = RunFollower(run)
    first = follower.look(1501.0)
    assert (first.state, first.step) == ("running", 5000)
    before = source.num_bytes
    append_steps(events / "00000.steps", range(5001, 5011))
    with (events / "00000.jsonl").open("a") as file:
        file.write(_loss_line(5010, 1.5) + '{"kind": "scal')
    second = follower.look(1502.0)
    assert second.step == 5010
    assert second.scalar("train/loss").values.tolist() == [2.0, 1.5]
    assert source.num_bytes - before < 8_000  # the ten new steps, and each rank's last fifty
    assert follower.look(1510.0 + 3600).state == "quiet"


def _loss_line(step: int, loss: float) -> str:
    values = {"train/loss": loss}
    line = {"kind": "scalars", "step": step, "time_s": 1000.0 + step * 0.1, "values": values}
    return json.dumps(line) + "\n"


def test_a_run_far_away_is_shown_like_one_at_hand(run: Path) -> None:
    memory: Any = fsspec.filesystem("memory")
    for path in run.rglob("*"):
        if path.is_file():
            memory.pipe_file(f"/far/made/{path.relative_to(run)}", path.read_bytes())
    far = open_run("memory://far/made")
    here = open_run(run)
    now_s = time.time()
    assert report_page(view_whole(far, now_s), 0.0) == report_page(view_whole(here, now_s), 0.0)
    assert RunFollower(far).look(now_s).step == 400


def test_an_attempt_nobody_could_speak_for_is_lost(run: Path, tmp_path: Path) -> None:
    make_run(tmp_path / "cut", MADE)
    (tmp_path / "cut/attempts/0001/end.json").unlink()
    view = view_whole(open_run(tmp_path / "cut"), time.time())
    assert [a.kind for a in view.attempts] == ["lost", "finished"]
    assert view.attempts[0].end_s <= view.attempts[1].start_s


def test_a_run_without_a_supervisor_says_itself_how_it_ended(tmp_path: Path) -> None:
    make_run(tmp_path / "alone", MADE)
    (tmp_path / "alone/attempts/0002/end.json").unlink()
    for view in (
        view_whole(open_run(tmp_path / "alone"), time.time()),
        RunFollower(open_run(tmp_path / "alone")).look(time.time()),
    ):
        assert view.state == "finished"
        assert view.attempts[-1].last_step == 400


def test_a_run_directory_with_nothing_in_it_yet(tmp_path: Path) -> None:
    (tmp_path / "attempts").mkdir()
    view = view_whole(open_run(tmp_path), time.time())
    assert view.state == "starting"
    report_page(view, 0.0)
    assert RunFollower(open_run(tmp_path)).look(time.time()).state == "starting"

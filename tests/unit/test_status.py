"""`drivetrain status` and `drivetrain runs`, on runs that were written by hand and by Trainer."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from drivetrain.cli.main import app
from drivetrain.core.errors import ConfigError
from drivetrain.record import RunDirectory
from drivetrain.record.reading import open_run
from drivetrain.record.status import NO_END, QUIET_S, status_of
from drivetrain.record.step_file import StepTimes, StepWriter
from drivetrain.view.describe import view_whole
from drivetrain.view.page import report_page
from drivetrain.view.summary import verdict


def write_run(path: Path, ranks: int = 2, **end: Any) -> RunDirectory:
    """Ten steps of a second each, after ten seconds of starting."""
    run = RunDirectory.at(path)
    run.write_run_yaml(
        "config: {max_steps: 20, record: {price_per_device_hour: 36.0}}\nsources: {}\n"
    )
    facts = {"command_s": 1000.0, "launched_s": 1002.0, "started_s": 1009.0}
    run.begin_attempt(1, {**facts, "world_size": ranks, "layout": "dp_replicate=2"})
    for rank in range(ranks):
        writer = StepWriter(run.events(rank).with_suffix(".steps"), 1)
        steps = [
            StepTimes(step, 1009.0 + step, 0.25, 0.5, 0.25, 0.0, 0.0, 0.0) for step in range(1, 11)
        ]
        writer.write(steps)
        writer.close()
    lines = [
        {"step": 10, "values": {"train/loss": 0.5, "throughput/samples_per_sec": 64.0}},
    ]
    text = "".join(
        json.dumps({"kind": "scalars", "time_s": 1019.9, **line}) + "\n" for line in lines
    )
    run.events(0).write_text(text)
    if end:
        run.end_attempt(1, end)
    return run


def test_what_a_status_says(tmp_path: Path) -> None:
    write_run(tmp_path / "gpt", kind="finished", time_s=1020.0)
    found = status_of(open_run(tmp_path / "gpt"), now_s=1100.0)
    assert (found.state, found.step, found.max_steps) == ("finished", 10, 20)
    assert (found.loss, found.samples_per_s, found.tokens_per_s) == (0.5, 64.0, None)
    assert found.ledger.wall_s == 20.0
    assert found.ledger.goodput == 0.25
    # two devices for 20 seconds at a cent a second each
    assert found.money is not None
    assert found.money.spent == pytest.approx(0.4)
    assert found.money.productive == pytest.approx(0.1)


def test_a_start_that_opened_no_attempt_is_shown(tmp_path: Path) -> None:
    run = write_run(tmp_path / "gpt", kind="finished", time_s=1020.0)
    facts = json.loads((run.attempt(1) / "start.json").read_text())
    run.begin_attempt(1, {**facts, "lost_starts": ["rank 1 was killed by SIGKILL"]})
    reading = open_run(tmp_path / "gpt")
    shown = CliRunner().invoke(app, ["status", str(tmp_path / "gpt")]).output
    assert "a start was lost before its attempt began: rank 1 was killed by SIGKILL" in shown
    page = report_page(view_whole(reading, 1100.0), 1100.0)
    assert "before attempt 1 began" in page
    assert page.count("rank 1 was killed by SIGKILL") == 1, "not among the run's facts"


@pytest.mark.parametrize(
    ("end", "after_s", "state"),
    [
        ({}, 1.0, "running"),
        ({}, QUIET_S + 5, "quiet"),
        ({"kind": "failed", "time_s": 1020.0}, 1.0, "failed"),
        ({"kind": "failed", "time_s": 1020.0, "restarts": True}, 1.0, "restarting"),
        ({"kind": "preempted", "time_s": 1020.0}, 1.0, "preempted"),
    ],
)
def test_the_state_of_a_run(
    tmp_path: Path, end: dict[str, Any], after_s: float, state: str
) -> None:
    write_run(tmp_path / "gpt", **end)
    assert status_of(open_run(tmp_path / "gpt"), 1020.0 + after_s).state == state


def test_an_attempt_that_left_no_end_is_said_to_have_left_none(tmp_path: Path) -> None:
    write_run(tmp_path / "gpt")
    run = open_run(tmp_path / "gpt")
    assert status_of(run, 1025.0).reason == ""
    assert status_of(run, 1020.0 + QUIET_S + 5).reason == NO_END
    assert NO_END in verdict(view_whole(run, 1020.0 + QUIET_S + 5))


def test_a_run_that_was_not_restarted_says_what_ended_it(tmp_path: Path) -> None:
    why = "its host was down"
    write_run(tmp_path / "gpt", kind="failed", time_s=1020.0, detail=why, restarts=True)
    run = open_run(tmp_path / "gpt")
    late_s = 1020.0 + QUIET_S + 5
    assert status_of(run, late_s).reason == why
    said = verdict(view_whole(run, late_s))
    assert why in said
    assert NO_END not in said


@pytest.mark.parametrize(
    ("end", "saved_step", "said"),
    [
        (
            {"detail": "a second SIGINT ended it at once", "failures": []},
            9,
            "Stopped at step 10 of 20 on 2 ranks, which was not saved: a second SIGINT ended it",
        ),
        ({"failures": []}, 0, "Stopped at step 10 of 20 on 2 ranks, which was not saved."),
        ({"detail": "a second SIGINT ended it", "failures": []}, 10, "Stopped and saved after"),
        ({"failures": [{"rank": 0, "exit_code": 75}]}, 10, "Stopped and saved after step 10"),
    ],
)
def test_a_run_that_was_stopped_says_whether_its_last_step_was_saved(
    tmp_path: Path, end: dict[str, Any], saved_step: int, said: str
) -> None:
    made = write_run(tmp_path / "gpt", kind="preempted", time_s=1020.0, step=10, **end)
    if saved_step:
        save = {"step": saved_step, "blocked_s": 0.1, "beside_s": 0.1}
        line = {"kind": "instant", "name": "saved", "time_s": 1019.95, "fields": save}
        with made.events(0).open("a") as file:
            file.write(json.dumps(line) + "\n")
    run = open_run(tmp_path / "gpt")
    assert status_of(run, 1030.0).state == "preempted"
    assert verdict(view_whole(run, 1030.0)).startswith(said)


def test_the_verb_shows_it_and_gives_it_to_programs(tmp_path: Path) -> None:
    failures = [{"rank": 1, "exit_code": -9, "error": ""}]
    write_run(tmp_path / "gpt", kind="failed", time_s=1020.0, failures=failures)
    shown = CliRunner().invoke(app, ["status", str(tmp_path / "gpt")])
    assert shown.exit_code == 0, shown.output
    for text in ("gpt  failed  step 10 of 20", "rank 1: killed by signal 9", "goodput 25.0%"):
        assert text in shown.output
    assert "latest: loss 0.5000, 64.0 samples/s" in shown.output
    assert "last heartbeat" in shown.output
    assert "cost 0.40, of which 0.30 was not productive" in shown.output
    document = json.loads(
        CliRunner().invoke(app, ["status", str(tmp_path / "gpt"), "--json"]).output
    )
    assert document["ledger_s"]["productive"] == pytest.approx(5.0)
    assert sum(document["ledger_s"].values()) == pytest.approx(document["wall_s"])


def test_the_time_between_two_runs_is_shown_but_not_counted(tmp_path: Path) -> None:
    run = write_run(tmp_path / "gpt", kind="finished", time_s=1020.0)
    run.begin_attempt(2, {"command_s": 5020.0, "launched_s": 5022.0, "started_s": 5030.0})
    run.end_attempt(2, {"kind": "finished", "time_s": 5040.0})
    shown = CliRunner().invoke(app, ["status", str(tmp_path / "gpt")]).output
    assert re.search(r"wall clock, mean of 2 ranks +40\.0 s\n", shown), shown
    assert re.search(r"between runs, not counted +4,000\.0 s\n", shown)
    document = json.loads(
        CliRunner().invoke(app, ["status", str(tmp_path / "gpt"), "--json"]).output
    )
    assert (document["wall_s"], document["between_runs_s"]) == (40.0, 4000.0)
    page = report_page(view_whole(open_run(tmp_path / "gpt"), 5100.0), 5100.0)
    assert "<td>between runs, not counted</td>" in page
    assert "1 h 6 min" in page
    assert "Finished 10 of 20 steps in 40 s." in page


def test_runs_are_listed_the_newest_first(tmp_path: Path) -> None:
    write_run(tmp_path / "a" / "old", kind="finished", time_s=1020.0)
    write_run(tmp_path / "new", kind="failed", time_s=1030.0)
    (tmp_path / "notes").mkdir()
    shown = CliRunner().invoke(app, ["runs", str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    assert [line.split()[:2] for line in shown.output.splitlines()[1:]] == [
        ["new", "failed"],
        ["old", "finished"],
    ]
    empty = CliRunner().invoke(app, ["runs", str(tmp_path / "notes")])
    assert empty.output.startswith("no runs in")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["status", "nowhere"], r"RUN = nowhere: no such directory; give a run's directory"),
        (["runs", "nowhere"], r"DIR = nowhere: no such directory; give the folder"),
    ],
)
def test_what_is_not_there_is_said_so(words: list[str], message: str) -> None:
    done = CliRunner().invoke(app, words)
    assert isinstance(done.exception, ConfigError)
    with pytest.raises(ConfigError, match=message):
        raise done.exception

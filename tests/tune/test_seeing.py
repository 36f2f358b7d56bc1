"""A study as a page and as a screen: read back from what was written."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from drivetrain.cli import looking
from drivetrain.core.errors import ConfigError
from drivetrain.tune import decide
from drivetrain.tune.journal import Asked, Ended, Journal, read_journal
from drivetrain.tune.page import study_page
from drivetrain.tune.screen import look
from drivetrain.tune.settings import Settings, Study, open_study
from drivetrain.tune.space import Choice, Float, Space

pytest.importorskip("optuna")
RATE, KIND = "optimization.learning_rate", "optimization.optimizer"


def searched(path: Path, num_ended: int = 12, **changes: Any) -> Study:
    space = Space({RATE: Float(1e-4, 1e-1, log=True), KIND: Choice(("adamw", "sgd"))})
    given = {"num_trials": 12, "generation": 6, "rungs": (4,), "sampler": "random", **changes}
    study = open_study(path, Settings("<train>.py", (), **given), space)
    journal = Journal(path)
    for trial in range(num_ended):
        journal.write(Asked(trial, {RATE: 1e-4 * 1.7**trial, KIND: ("adamw", "sgd")[trial % 2]}))
        end = Ended(trial, 0, "done", 4, 0.5 + trial / 10)
        journal.write(end if trial != 3 else Ended(3, 0, "failed", reason="<b>no</b>"))
    while works := decide.ready(study.settings, journal.state):
        for work in works:
            journal.write(Ended(work.trial, work.rung, "done", 12, 0.2 + work.trial / 10))
    return study


def test_the_page_of_a_study(tmp_path: Path) -> None:
    study = searched(tmp_path / "study")
    page = study_page(study, 0.0)
    assert "Trial 0 is the best: loss 0.2 after step 12." in page
    titles = re.findall(r"<h3>(.*?)</h3>", page)
    assert titles == ["History", "Rungs", "Parameters", "Importance"]
    assert "loss at step 4, 11 trials" in page, "where most have a value"
    assert page.count('style="stroke:var(--shade-') == 11
    assert "&lt;b&gt;no&lt;/b&gt;" in page
    assert "<b>no" not in page
    assert '<tr class="chosen"><td class="number">0</td>' in page
    shares = [int(each) for each in re.findall(r'<span class="number">(\d+)%</span>', page)]
    assert sum(shares) in (99, 100, 101)
    assert "<h2>Trials" not in study_page(study, 0.0, has_trials=False)


def test_a_study_with_few_results_shows_what_there_is(tmp_path: Path) -> None:
    assert "no trial has a result" in study_page(searched(tmp_path / "none", 0), 0.0)
    one = study_page(searched(tmp_path / "one", 1, rungs=()), 0.0)
    assert re.findall(r"<h3>(.*?)</h3>", one) == ["History"]
    upwards = study_page(searched(tmp_path / "max", mode="max"), 0.0)
    assert "Trial 11 is the best" in upwards


def test_report_plot_and_watch_take_a_study(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = searched(tmp_path / "study")
    looking.report(str(study.path), str(tmp_path / "report.html"))
    looking.plot(str(study.path), str(tmp_path / "plot.html"))
    assert "<h2>Trials" in (tmp_path / "report.html").read_text()
    assert "<h2>Trials" not in (tmp_path / "plot.html").read_text()
    with pytest.raises(ConfigError, match="charts are written as an HTML page"):
        looking.plot(str(study.path), str(tmp_path / "plot.png"))
    capsys.readouterr()
    looking.watch(str(study.path), 2.0, once=True)
    said = capsys.readouterr().out
    assert "best loss 0.2  trial 0" in said
    assert "nothing is running" in said


def test_the_screen_says_what_waits_and_is_as_high_as_the_terminal(tmp_path: Path) -> None:
    study = searched(tmp_path / "study", num_ended=6, num_trials=20)
    Journal(study.path).write(Asked(6, {RATE: 1e-3, KIND: "sgd"}))
    now = look(study)
    assert (now.running, now.num_waiting) == ([], 1)
    console = Console(file=io.StringIO(), width=90, height=14)
    with console.capture() as captured:
        console.print(now.frame(90, 14, "foot"))
    lines = captured.get().splitlines()
    assert len(lines) <= 14
    assert "0 running, 1 waiting to start" in lines[2]
    assert "13 to come" in lines[2]
    assert "and 1 more" in lines[-2]
    assert len(read_journal(study.path).asked) == 7


def test_what_only_reads_a_study_loads_no_torch() -> None:
    code = (
        "import sys, drivetrain.cli.tune, drivetrain.cli.predicting; print('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert said.stdout.strip() == "False"

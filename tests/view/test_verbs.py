from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.reading.made_run import MadeRun, make_run

DIGITS = Path(__file__).parents[2] / "examples" / "digits.py"


def drivetrain(*words: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "drivetrain", *map(str, words)]
    screen = {**os.environ, "COLUMNS": "80", "LINES": "24"}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=150, check=False, cwd=cwd, env=screen
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "made"
    make_run(path, MadeRun(num_ranks=4, num_steps=200, save_steps=50, slow_rank=2))
    return path


def test_report_writes_a_page(run: Path, tmp_path: Path) -> None:
    done = drivetrain("report", run, "-o", tmp_path / "sub" / "page.html")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "sub" / "page.html").read_text()
    assert "Finished 200 of 200 steps on 4 ranks" in page
    assert "Findings" in page


def test_watch_prints_one_frame_into_a_pipe(run: Path) -> None:
    done = drivetrain("watch", run)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 24
    assert "made" in lines[0]
    assert "finished" in lines[0]
    assert "4 ranks  slowest: 2" in done.stdout


def test_compare_shows_both(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    make_run(other, MadeRun(num_ranks=2, num_steps=100, save_steps=50, has_failure=False))
    done = drivetrain("compare", run, other, "-o", tmp_path / "both.html")
    assert done.returncode == 0, done.stderr
    assert "max_steps" in done.stdout
    assert "line-2" in (tmp_path / "both.html").read_text()


def test_what_is_not_a_run_is_said_so(tmp_path: Path) -> None:
    for verb in ("report", "watch"):
        done = drivetrain(verb, "nowhere", cwd=tmp_path)
        assert done.returncode == 2
        assert "RUN = nowhere: no such directory; give a run's directory" in done.stderr
        assert "Traceback" not in done.stderr


def test_a_page_that_cannot_be_written_is_said_so(run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = drivetrain("report", run, "-o", tmp_path / "file" / "page.html")
    assert done.returncode == 2
    assert "--output = " in done.stderr
    assert "give a file in a folder you may write to" in done.stderr


@pytest.mark.slow
@pytest.mark.long
def test_a_real_run_on_two_ranks_is_shown(tmp_path: Path) -> None:
    run = tmp_path / "digits"
    words = ("train", "--nproc-per-node", 2, "--run-dir", run, DIGITS, "max_steps=30")
    done = drivetrain(*words, "checkpoint.every_steps=10", "record.logging_steps=1")
    assert done.returncode == 0, done.stderr
    page = drivetrain("report", run, "-o", tmp_path / "page.html")
    assert page.returncode == 0, page.stderr
    written = (tmp_path / "page.html").read_text()
    assert "Finished 30 of 30 steps on 2 ranks" in written
    assert "Validation accuracy" in written
    assert "3 checkpoints blocked training" in written
    assert '<td class="note">launcher</td><td>drivetrain train</td>' in written
    frame = drivetrain("watch", run, "--once").stdout
    assert "2 ranks" in frame
    assert "finished" in frame

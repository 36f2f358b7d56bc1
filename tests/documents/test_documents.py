"""What the field's documents print is tried as printed, in real processes."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.documents.row import Row
from tests.documents.rows import ROWS
from tests.documents.table import page_with_rows

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
PAGE = ROOT / "docs" / "from-the-documents.md"
SNIPPETS = [row for row in ROWS if row.code]
COMMANDS = [row for row in ROWS if row.command]
IN_PLAIN_RUN = ("torchrun", "cli-ray", "slurm-launch")
"""The commands that are tried each time; the others are `make documents`'."""


def is_there(row: Row) -> bool:
    return not row.needs or find_spec(row.needs) is not None


def run(words: list[str], cwd: Path, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    found = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        words,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PATH": found},
    )


def test_the_page_has_every_row() -> None:
    assert page_with_rows(PAGE.read_text()) == PAGE.read_text()
    assert len({row.key for row in ROWS}) == len(ROWS)
    for row in ROWS:
        shown = row.code or row.command or (ROOT / row.shown_by).is_file()
        assert shown or row.outcome in ("not yet", "not run"), row.key


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """All snippets on two ranks, one after the other; what became of each, by rank."""
    folder = tmp_path_factory.mktemp("snippets")
    keys = [row.key for row in SNIPPETS if is_there(row)]
    words = [sys.executable, "-m", "drivetrain", "train", "--nproc-per-node", "2"]
    done = run([*words, str(HERE / "run_rows.py"), str(folder), *keys], folder, 500)
    files = [folder / f"found-{rank}.json" for rank in range(2)]
    assert all(file.is_file() for file in files), done.stdout[-3000:] + done.stderr[-3000:]
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("row", SNIPPETS, ids=lambda row: row.key)
def test_a_snippet(row: Row, found: list[dict[str, Any]]) -> None:
    if not is_there(row):
        pytest.skip(f"{row.needs} is not installed")
    for by_key in found:
        outcome, said = by_key.get(row.key, ("failed", "not reached: one before it failed"))
        assert outcome == row.outcome, said
        if outcome == "refused":
            assert said == row.remark.replace("`", "")


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(
            row,
            id=row.key,
            marks=() if row.key in IN_PLAIN_RUN else (pytest.mark.slow, pytest.mark.long),
        )
        for row in COMMANDS
    ],
)
def test_a_command(row: Row, tmp_path: Path) -> None:
    if not is_there(row):
        pytest.skip(f"{row.needs} is not installed")
    shutil.copytree(HERE / "folder", tmp_path, dirs_exist_ok=True)
    words = shlex.split(row.command)
    words[0] = sys.executable if words[0] == "python" else words[0]
    done = run(words, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    if not {"--dry-run", "env"} & set(words):
        assert "DONE" in done.stdout
    if "deepspeed" in row.key:
        assert "deepspeed on 2" in done.stdout


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(find_spec("ray") is None, reason="pip install 'drivetrain[ray]'")
def test_what_a_search_has_drawn_in_a_task_of_ray(tmp_path: Path) -> None:
    done = run([sys.executable, str(HERE / "folder" / "ray_task.py"), str(tmp_path)], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "DONE 4 steps" in done.stdout
    assert "DONE on ray: 4 steps" in done.stdout


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="pip install 'drivetrain[deepspeed]'")
def test_deepspeeds_own_class_takes_no_keywords(tmp_path: Path) -> None:
    code = "from deepspeed import DeepSpeedConfig\nDeepSpeedConfig(zero_optimization={})"
    done = run([sys.executable, "-c", code], tmp_path)
    assert "unexpected keyword argument 'zero_optimization'" in done.stderr

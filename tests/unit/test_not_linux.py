"""Without Linux: import, plan, train in one process and read runs; the rest is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import drivetrain

HIDDEN = Path(__file__).parent / "not_linux"
SCRIPT = """
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset
from drivetrain import Task, Trainer, load_config

task = Task(
    model=lambda: torch.nn.Linear(4, 2),
    loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
)
data = TensorDataset(torch.randn(32, 4, generator=torch.manual_seed(1)), torch.arange(32) % 2)
config = load_config(defaults={"global_batch_size": 8, "num_train_epochs": 1})
Trainer(task, config).fit(data)
"""


def on_a_laptop(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    source = Path(drivetrain.__file__).parents[1]
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{HIDDEN}:{source}"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="module")
def laptop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which a script has trained twice."""
    folder = tmp_path_factory.mktemp("laptop")
    (folder / "train.py").write_text(SCRIPT)
    for name in ("a", "b"):
        done = on_a_laptop(folder, "train.py", f"name={name}")
        assert done.returncode == 0, done.stderr
    return folder


def test_the_calls_are_hidden(tmp_path: Path) -> None:
    looks = "import os, pathlib; print(hasattr(os, 'pidfd_open'), pathlib.Path('/proc').exists())"
    assert on_a_laptop(tmp_path, "-c", looks).stdout.split() == ["False", "False"]


def test_one_process_trains(laptop: Path) -> None:
    assert (laptop / "runs" / "a" / "run.yaml").is_file()


@pytest.mark.parametrize(
    "words",
    [
        ("status", "runs/a"),
        ("runs", "runs"),
        ("report", "runs/a", "--output", "page.html"),
        ("compare", "runs/a", "runs/b"),
        ("diagnose", "runs/a"),
        ("checkpoint", "ls", "runs/a"),
        ("plan", "train.py", "--cluster", "a100-80:8"),
        ("doctor",),
        ("env",),
        ("train", "train.py", "--on", "slurm", "--dry-run"),
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_what_a_laptop_does(laptop: Path, words: tuple[str, ...]) -> None:
    done = on_a_laptop(laptop, "-m", "drivetrain", *words)
    assert "Traceback" not in done.stderr, done.stderr
    # the doctor may find fault with a laptop; the rest succeeds
    assert done.returncode == 0 or words == ("doctor",), done.stdout + done.stderr


def test_ranks_with_a_supervisor_are_refused_with_what_to_do(laptop: Path) -> None:
    done = on_a_laptop(laptop, "-m", "drivetrain", "train", "train.py", "--nproc-per-node", "2")
    assert done.returncode == 4
    assert "needs Linux" in done.stderr
    assert "`python SCRIPT`" in done.stderr
    assert "Traceback" not in done.stderr

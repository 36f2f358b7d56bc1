"""Ranks that begin before their supervisor has imported torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

# Appends, so that ranks which are started a second time are seen.
_SCRIPT = """\
import os, sys
line = " ".join(os.environ.get(name, "-") for name in sys.argv[2:])
with open(f"{sys.argv[1]}/{os.environ['RANK']}", "a") as file:
    file.write(line + "\\n")
"""
_BEFORE_TORCH = """\
import sys
from drivetrain.launch.early import start_early
head_start = start_early(sys.argv[1:])
print("torch" in sys.modules, head_start and [w.process.wait() for w in head_start.node.workers])
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(_SCRIPT)
    return path


def _start_early(tmp_path: Path, *words: str, **variables: str) -> str:
    session = tmp_path / "session"
    session.mkdir()
    settled = {"DRIVETRAIN_NODE_SESSION": str(session), "DRIVETRAIN_COMMAND_S": "1.0"}
    done = subprocess.run(
        [sys.executable, "-c", _BEFORE_TORCH, *words],
        env={**os.environ, **settled, **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.strip()


def test_the_script_is_done_before_torch_is_imported(tmp_path: Path, script: Path) -> None:
    told = _start_early(tmp_path, "--nproc-per-node=2", str(script), str(tmp_path), "WORLD_SIZE")
    assert told == "False [0, 0]"
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["2\n", "2\n"]


@pytest.mark.parametrize(
    "words",
    [
        ["--nnodes=2", "--run-dir=run"],
        ["--no-python"],
        ["--tee=3"],
        ["--nproc-per-node=gpu"],
        ["--live", "--run-dir=run"],
        ["--spares=many"],
        ["--no-such-flag"],
    ],
)
def test_what_asks_for_more_is_left_to_the_supervisor(
    tmp_path: Path, script: Path, words: list[str]
) -> None:
    assert _start_early(tmp_path, *words, str(script), str(tmp_path)) == "False None"


def test_a_vendors_devices_are_left_to_the_supervisor(tmp_path: Path, script: Path) -> None:
    described = tmp_path / "vendor" / "vendor-0.dist-info"
    described.mkdir(parents=True)
    (described / "entry_points.txt").write_text("[torch.backends]\nvendor = vendor:autoload\n")
    path = os.pathsep.join([str(described.parent), os.environ.get("PYTHONPATH", "")])
    assert _start_early(tmp_path, str(script), str(tmp_path), PYTHONPATH=path) == "False None"


def test_torchruns_variables_are_left_to_the_supervisor(tmp_path: Path, script: Path) -> None:
    assert (
        _start_early(tmp_path, str(script), str(tmp_path), PET_NPROC_PER_NODE="2") == "False None"
    )


def test_the_supervisor_keeps_the_ranks_it_finds(tmp_path: Path, script: Path) -> None:
    """Told once, started once; what only concerns the supervisor has not reached them."""
    told = ["RANK", "LOCAL_RANK", "MASTER_ADDR", "DRIVETRAIN_RUN_DIR", "OMP_NUM_THREADS"]
    not_told = ["DRIVETRAIN_NODE_SESSION", "DRIVETRAIN_SUPERVISOR_PID"]
    flags = ["--nproc-per-node=2", "--run-dir=run", "--max-restarts=3"]
    words = [*flags, str(script), str(tmp_path), *told, *not_told]
    subprocess.run(
        [sys.executable, "-m", "drivetrain", "train", *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        timeout=60,
        check=True,
    )
    for rank in "01":
        expected = f"{rank} {rank} 127.0.0.1 {tmp_path / 'run'} 1 - -\n"
        assert (tmp_path / rank).read_text() == expected


def test_time_that_is_up_before_the_supervisor_listens_is_no_failure(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("open('begun', 'w').close()\nimport time\ntime.sleep(600)\n")
    command = [sys.executable, "-m", "drivetrain", "train", "--nproc-per-node=1", str(script)]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        deadline_s = time.monotonic() + 30
        while not (tmp_path / "begun").exists() and time.monotonic() < deadline_s:
            time.sleep(0.001)
        process.send_signal(signal.SIGUSR1)  # the rank is at work, its supervisor imports torch
        assert process.wait(timeout=60) == 75

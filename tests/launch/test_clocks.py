"""Hosts whose clocks are wrong: no decision compares the clocks of two machines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CLOCK = Path(__file__).parent / "clock"
SCRIPT = "import os; print('world', os.environ['WORLD_SIZE'], flush=True)"


def start(folder: Path, script: Path, nodes: str, skew_s: float) -> subprocess.Popen[str]:
    words = ["train", "--nnodes", nodes, "--nproc-per-node", "1", "--local-addr", "127.0.0.1"]
    words += ["--rdzv-conf", "last_call_timeout=3,join_timeout=20", "--run-dir", str(folder)]
    path = os.pathsep.join([str(CLOCK), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-m", "drivetrain", *words, str(script)],
        env={**os.environ, "PYTHONPATH": path, "SKEW_S": str(skew_s)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize(
    ("skew_s", "nodes"),
    [(600, "2"), pytest.param(-600, "1:2", marks=pytest.mark.slow)],
    ids=["ahead", "behind, elastic"],
)
def test_nodes_meet_though_their_clocks_are_ten_minutes_apart(
    skew_s: float, nodes: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    both = [start(tmp_path / "run", script, nodes, each) for each in (0, skew_s)]
    said = [each.communicate(timeout=60)[0] for each in both]
    assert [each.returncode for each in both] == [0, 0], said
    assert all("world 2" in text for text in said), said

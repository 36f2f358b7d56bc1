"""A script without Drivetrain in it that waits for itself is ended with a verdict."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_SCRIPT = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
other = 1 - dist.get_rank()
mine, theirs = torch.ones(1 << 22), torch.empty(1 << 22)
dist.all_reduce(mine)
dist.send(mine, other)
dist.recv(theirs, other)
"""


@pytest.mark.slow
def test_two_sends_that_wait_for_each_other_are_named(tmp_path: Path) -> None:
    script = tmp_path / "pair.py"
    script.write_text(_SCRIPT)
    flags = ["--nproc-per-node=2", "--stall-timeout=3"]
    command = [sys.executable, "-m", "drivetrain", "train", *flags, str(script)]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False
    )
    assert ended.returncode == 1
    assert "no rank has computed anything for" in ended.stderr
    assert "every rank waits for another: ranks 0 and 1 in send at pair.py:7" in ended.stderr
    assert "restarting" not in ended.stderr

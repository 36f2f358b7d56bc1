"""A rank that fails ends at once: it does not take leave of a group that waits for it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

# destroy_process_group is the real one; where a rank has failed it is made to wait first, as NCCL's
# does for collectives that are still under way. (gloo's does not wait.)
_SCRIPT = """\
import os
import sys
import time
from pathlib import Path

import torch.distributed as dist
from drivetrain.cluster.environments import detect
from drivetrain.config.schema import Parallel
from drivetrain.parallel.world import join_world

folder, how = Path(sys.argv[1]), sys.argv[2]
world = join_world(detect(), Parallel())
destroy = dist.destroy_process_group


def watched():
    (folder / f"destroyed-{world.rank}").touch()
    if how in ("error", "exit"):
        time.sleep(30)
    destroy()


dist.destroy_process_group = watched
dist.barrier()
if how != "clean":
    if world.rank == 0:
        dist.barrier()  # the other never comes
    elif how == "exit":
        sys.exit(3)
    else:
        raise RuntimeError("planted")
"""
_DRIVETRAIN = ("-m", "drivetrain", "train", "--max-restarts=0", "--max-startup-failures=0")
_TORCHRUN = ("-m", "torch.distributed.run", "--standalone")


def _run(tmp_path: Path, launcher: tuple[str, ...], how: str) -> tuple[int, float]:
    """Exit code, and the seconds it took."""
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    began_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, *launcher, "--nproc-per-node=2", str(script), str(tmp_path), how],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, time.monotonic() - began_s


@pytest.mark.parametrize(
    ("launcher", "how"),
    [
        (_DRIVETRAIN, "error"),
        pytest.param(_DRIVETRAIN, "exit", marks=[pytest.mark.slow, pytest.mark.long]),
        pytest.param(_TORCHRUN, "error", marks=[pytest.mark.slow, pytest.mark.long]),
    ],
)
def test_a_failing_rank_leaves_without_a_word(
    tmp_path: Path, launcher: tuple[str, ...], how: str
) -> None:
    code, took_s = _run(tmp_path, launcher, how)
    assert code != 0
    assert not list(tmp_path.glob("destroyed-*"))
    assert took_s < 30  # torch's imports included


@pytest.mark.parametrize(
    "launcher", [_DRIVETRAIN, pytest.param(_TORCHRUN, marks=[pytest.mark.slow, pytest.mark.long])]
)
def test_a_rank_that_ends_well_takes_leave(tmp_path: Path, launcher: tuple[str, ...]) -> None:
    assert _run(tmp_path, launcher, "clean")[0] == 0
    assert len(list(tmp_path.glob("destroyed-*"))) == 2


_AT_EXIT = """\
import atexit, sys, threading
from drivetrain.core.processes import is_failing, settle_exit_code
from drivetrain.core.errors import Preempted
atexit.register(lambda: print(is_failing()))
"""


@pytest.mark.parametrize(
    ("end", "fails"),
    [
        ("pass", False),
        ("raise ValueError", True),
        ("sys.excepthook = lambda *error: None\nraise ValueError", True),
        ("raise Preempted('asked to stop, and saved')", False),
        ("settle_exit_code(3)", True),
        ("settle_exit_code(75)", False),
        ("thread = threading.Thread(target=lambda: 1 / 0); thread.start(); thread.join()", False),
    ],
)
def test_whether_a_process_is_failing(end: str, fails: bool) -> None:
    words = [sys.executable, "-c", f"{_AT_EXIT}{end}\n"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == str(fails)

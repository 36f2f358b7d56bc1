"""Folders on a disk that is offloaded to: one for each process, and none left behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from drivetrain.strategies.deepspeed.offload import own_folder

KILLED = """
import os, signal, sys
from pathlib import Path
from drivetrain.strategies.deepspeed.offload import own_folder
class Owner: pass
owner = Owner()
print(own_folder(Path(sys.argv[1]), owner), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


class Owner:
    """Whom a folder belongs to."""


def folders(disk: Path) -> set[Path]:
    return {path for path in disk.iterdir() if path.is_dir()}


def test_each_owner_has_one_and_takes_it_along(tmp_path: Path) -> None:
    first, second = Owner(), Owner()
    of_first, of_second = own_folder(tmp_path, first), own_folder(tmp_path, second)
    (of_first / "1.swp").write_text("x")
    assert folders(tmp_path) == {of_first, of_second}
    del first
    assert folders(tmp_path) == {of_second}


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True, check=False
    )
    left = Path(killed.stdout.strip())
    assert left.is_dir()
    owner = Owner()
    mine = own_folder(tmp_path, owner)
    assert folders(tmp_path) == {mine}

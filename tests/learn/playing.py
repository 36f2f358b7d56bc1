"""A puzzle's commands, as a learner types them, on the script with its bug and without."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from drivetrain.learn.puzzles import Puzzle


@dataclass(frozen=True)
class Played:
    """What the last command said, and how all of them ended."""

    said: str
    codes: list[int]
    took_s: float

    def shows(self, puzzle: Puzzle) -> bool:
        return puzzle.shows in " ".join(self.said.split())


def play(puzzle: Puzzle, folder: Path, *, is_fixed: bool) -> Played:
    """In a folder of its own, with real ranks."""
    script = folder / puzzle.file
    script.parent.mkdir(parents=True)
    script.write_text(puzzle.fixed if is_fixed else puzzle.text)
    begin_s = time.monotonic()
    codes = []
    for command in puzzle.commands:
        ran = subprocess.run(
            [sys.executable, "-m", *shlex.split(command)],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
            check=False,
        )
        codes.append(ran.returncode)
    return Played(ran.stdout, codes, time.monotonic() - begin_s)

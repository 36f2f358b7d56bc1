"""Console blocks of a page: commands with the output they really gave.

`python -m tests.console_blocks docs/config.md` runs every `$ drivetrain …` of the page and writes
its output under it; the test of the same name fails when the two have come apart.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

BLOCK = re.compile(r"```console\n(\$ (drivetrain [^\n]*)\n)(.*?)```", re.DOTALL)


def output_of(command: str) -> str:
    words = shlex.split(command)[1:]
    result = subprocess.run(
        [sys.executable, "-m", "drivetrain", *words], capture_output=True, text=True, check=False
    )
    shown = result.stdout + result.stderr
    return shown + (f"(exit code {result.returncode})\n" if result.returncode else "")


def refreshed(page: str) -> str:
    return BLOCK.sub(lambda m: f"```console\n{m[1]}{output_of(m[2])}```", page)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        Path(name).write_text(refreshed(Path(name).read_text()))

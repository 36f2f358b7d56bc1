"""`python -m tests.resume.table PAGE`: change one thing at a time, and write what happens."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.doctor.table import with_table
from tests.resume.changes import CHANGES, observe

BEGIN, END = "<!-- changes -->", "<!-- end of changes -->"


def rows() -> list[str]:
    lines = ["| changed between attempts | what happens | message |", "| --- | --- | --- |"]
    for change in CHANGES:
        with tempfile.TemporaryDirectory() as folder:
            seen = observe(change, Path(folder))
        is_right = seen.happens == change.happens
        sys.stderr.write(f"{'ok ' if is_right else 'BAD'} {change.what}: {seen}\n")
        lines.append(f"| {change.what} | {seen.happens} | {seen.message} |")
    return lines


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.write_text(with_table(target.read_text(), rows(), BEGIN, END))

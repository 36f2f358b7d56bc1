"""`python tests/pages/play.py PAGE FOLDER [--write]`: the commands of a page, run in order.

Needs the standard library and a `drivetrain` on the path. Every command must end with 0 and with
the line the page shows last, apart from numbers; hashes in one block must be the same, and who was
killed on the page must be killed and resume again. `--write` puts what was printed on the page. A
block with the title "another terminal" runs while the one before it does, once that has saved a
checkpoint and goes on. What is not to be run stands in blocks of another kind than `console`.
"""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import dropwhile
from pathlib import Path

BLOCK = re.compile(r"```console( title=\"another terminal\")?\n(.*?)```\n", re.DOTALL)
_NUMBER = re.compile(r"[0-9a-f]{64}|\d[\d.,:]*")
_KEPT = ("was killed by SIGKILL", "resumed: after step")
_OF_OTHERS = re.compile(r"Failed to load .*torchao|W\d{4} .*torch/|Loading weights:")
"""What libraries say while they are loaded."""
_TIMEOUT_S = 600


def commands(block: str) -> list[str]:
    return [line[2:] for line in block.splitlines() if line.startswith("$ ")]


def played(page: str, folder: Path) -> str:
    """The page with what its commands print now."""
    blocks = list(BLOCK.finditer(page))
    shown: dict[int, str] = {}
    for number, block in enumerate(blocks):
        if block[1]:
            continue  # ran with the one before it
        beside = blocks[number + 1] if number + 1 < len(blocks) and blocks[number + 1][1] else None
        meanwhile = commands(beside[2]) if beside else []
        shown[block.start()] = "".join(_run(c, folder, meanwhile) for c in commands(block[2]))
    return BLOCK.sub(lambda m: _block(m, shown), page)


def _block(found: re.Match[str], shown: dict[int, str]) -> str:
    if found.start() not in shown:
        return found[0]
    return f"```console\n{shown[found.start()]}```\n"


def _run(command: str, folder: Path, meanwhile: list[str]) -> str:
    print(f"$ {command}", flush=True)
    run = subprocess.Popen(
        ["bash", "-c", command],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines = []
    assert run.stdout is not None
    for line in run.stdout:
        print(line, end="", flush=True)
        lines.append(line.rstrip() + "\n")
        if meanwhile and _has_saved(lines):
            for each in meanwhile:
                print(f"(another terminal) $ {each}", flush=True)
                subprocess.run(["bash", "-c", each], cwd=folder, check=True)
            meanwhile = []
    if run.wait(_TIMEOUT_S) or meanwhile:
        sys.exit(f"$ {command}: exit code {run.returncode}, not run beside it: {meanwhile}")
    return f"$ {command}\n" + "".join(_shortened(_own(lines, folder)))


def _own(lines: list[str], folder: Path) -> list[str]:
    """Without what other libraries say, and without where the commands were run."""
    own = [line for line in lines if not _OF_OTHERS.match(line)]
    began = dropwhile(str.isspace, own)  # a progress bar leaves empty lines
    return [line.replace(f"{folder.resolve()}/", "") for line in began]


def _has_saved(lines: list[str]) -> bool:
    """A save was announced, and three lines of progress since."""
    saves = [number for number, line in enumerate(lines) if line.startswith("checkpoints:")]
    return bool(saves) and len(lines) > saves[0] + 3


def _shortened(lines: list[str]) -> list[str]:
    """A stretch of progress as its first two lines and its last."""
    kept: list[str] = []
    stretch: list[str] = []
    for line in [*lines, ""]:
        if line.startswith("step "):
            stretch.append(line)
            continue
        kept += stretch if len(stretch) <= 4 else [*stretch[:2], "…\n", *stretch[-2:]]
        stretch = []
        kept += [line] if line else []
    return kept


def differences(old: str, new: str) -> list[str]:
    """What the commands said otherwise than the page, where it matters."""
    found = []
    for before, after in zip(BLOCK.finditer(old), BLOCK.finditer(new), strict=True):
        last = [_NUMBER.sub("#", block[2].splitlines()[-1]) for block in (before, after)]
        if last[0] != last[1]:
            found.append(f"{last[1]!r} instead of {last[0]!r}")
        if len(set(re.findall(r"[0-9a-f]{64}", after[2]))) > 1:
            found.append(f"hashes differ:\n{after[2]}")
    return found + [f"nobody said {each!r}" for each in _KEPT if each in old and each not in new]


if __name__ == "__main__":
    path, workplace = Path(sys.argv[1]), Path(sys.argv[2])
    page = path.read_text()
    now = played(page, workplace)
    if "--write" in sys.argv[3:]:
        path.write_text(now)
    elif differ := differences(page, now):
        sys.exit("\n".join(differ))

"""`python tests/pages/play.py PAGE FOLDER [--write]`: the commands of a page, run in order.

Needs the standard library and a `drivetrain` on the path. What stands in `console` blocks is run.
Every command must end with the exit code and the last line that the page shows, apart from numbers;
hashes in one block must be the same, and who was killed on the page must be killed and resume
again. `--write` puts what was printed on the page.

- A code block with a title, `title="train.py"`, is written to that file first.
- `<!-- play: COMMAND -->` is run where it stands, and readers do not see it; `$PAGES` is the folder
  of the page.
- A `console` block with `title="another terminal"` runs while the block before it does, once that
  has saved a checkpoint and goes on.
- Output that begins with `…` is an excerpt: each of its lines must be printed again, in order,
  apart from numbers. Of other output, long stretches of progress are left out.
- `^C` in the output: Ctrl-C is pressed once the run has come to the step of the line above it.
- `(exit code 2)` as the last line: the command must end with that code. Without it, with 0.

What is not to be run stands in blocks of another kind.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import dropwhile, pairwise, takewhile
from pathlib import Path

BESIDE = ' title="another terminal"'
_STEP = re.compile(
    rf"^(?P<indent> *)```console(?P<beside>{BESIDE})?\n(?P<block>.*?)^ *```\n"
    r'|^(?P<margin> *)```\w+ title="(?P<file>[\w./-]+)"\n(?P<text>.*?)^ *```\n'
    r"|^<!-- play: (?P<unseen>.*?) -->\n",
    re.DOTALL | re.MULTILINE,
)
_NUMBER = re.compile(r"[0-9a-f]{64}|\d[\d.,:]*")
_KEPT = ("was killed by SIGKILL", "resumed: after step")
_OF_OTHERS = re.compile(r"Failed to load .*torchao|W\d{4} .*torch/|Loading weights:")
"""What libraries say while they are loaded."""
_LEFT_OUT = "…\n"
_CTRL_C = "^C\n"
_WIDTH = "COLUMNS"
"""Pages show what is printed into a pipe, however wide the terminal around us is."""
_TIMEOUT_S = 600


@dataclass(frozen=True)
class Command:
    """A line with `$`, and what the page shows under it."""

    line: str
    shown: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        found = re.fullmatch(r"\(exit code (\d+)\)\n", self.shown[-1]) if self.shown else None
        return int(found[1]) if found else 0

    @property
    def interrupted_at(self) -> int | None:
        """After which step Ctrl-C is pressed."""
        if _CTRL_C not in self.shown:
            return None
        return _step_of(self.shown[self.shown.index(_CTRL_C) - 1])


def commands(block: str) -> list[Command]:
    found: list[Command] = []
    for line in block.splitlines(keepends=True):
        if line.startswith("$ "):
            found.append(Command(line[2:-1], ()))
        elif found:
            found[-1] = Command(found[-1].line, (*found[-1].shown, line))
    return found


def played(page: str, folder: Path) -> str:
    """The page with what its commands print now."""
    steps = list(_STEP.finditer(page))
    blocks = [step for step in steps if step["block"]]
    beside = {
        block.start(): commands(_without(after["indent"], after["block"]))
        for block, after in pairwise(blocks)
        if after["beside"]
    }
    parts, end = [], 0
    for step in steps:
        parts.append(page[end : step.start()])
        parts.append(_played(step, folder, beside.get(step.start(), [])))
        end = step.end()
    return "".join(parts) + page[end:]


def _played(step: re.Match[str], folder: Path, meanwhile: list[Command]) -> str:
    if step["unseen"]:
        subprocess.run(["bash", "-ec", step["unseen"]], cwd=folder, check=True)
    elif step["file"]:
        path = folder / step["file"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_without(step["margin"], step["text"]))
    elif not step["beside"]:  # otherwise, it ran with the one before it
        block = _without(step["indent"], step["block"])
        now = "".join(_run(each, folder, meanwhile) for each in commands(block))
        lines = ("```console\n" + now + "```\n").splitlines(keepends=True)
        return "".join(step["indent"] + line if line.strip() else line for line in lines)
    return step[0]


def _without(margin: str, text: str) -> str:
    return "".join(line.removeprefix(margin) for line in text.splitlines(keepends=True))


def _run(command: Command, folder: Path, meanwhile: list[Command]) -> str:
    print(f"$ {command.line}", flush=True)
    with subprocess.Popen(
        ["bash", "-c", command.line],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name != _WIDTH},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # what a terminal sends Ctrl-C to
    ) as run:
        lines: list[str] = []
        for line in _heard(run):
            lines.append(line)
            if _is_time_for_ctrl_c(command, lines):
                os.killpg(run.pid, signal.SIGINT)
                lines.append(_CTRL_C)
            if meanwhile and _has_saved(lines):
                _run_beside(meanwhile, folder)
                meanwhile = []
        code = run.wait(_TIMEOUT_S)
    if meanwhile:
        sys.exit(f"$ {command.line}: saved no checkpoint, so that these did not run: {meanwhile}")
    if code != command.exit_code:
        sys.exit(f"$ {command.line}: exit code {code}")
    own = _own([*lines, f"(exit code {code})\n"] if code else lines, folder)
    is_excerpt = command.shown[:1] == (_LEFT_OUT,)
    told = excerpt(command.shown, own) if is_excerpt else _shortened(own)
    return f"$ {command.line}\n" + "".join(told)


def _run_beside(others: list[Command], folder: Path) -> None:
    for each in others:
        print(f"(another terminal) $ {each.line}", flush=True)
        subprocess.run(["bash", "-c", each.line], cwd=folder, check=True)


def _is_time_for_ctrl_c(command: Command, lines: list[str]) -> bool:
    if command.interrupted_at is None or _CTRL_C in lines:
        return False
    return _step_of(lines[-1]) >= command.interrupted_at


def _step_of(line: str) -> int:
    found = re.match(r"step (\d+)", line)
    return int(found[1]) if found else -1


def _heard(run: subprocess.Popen[str]) -> Iterator[str]:
    assert run.stdout is not None
    for line in run.stdout:
        print(line, end="", flush=True)
        yield line.rstrip() + "\n"


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
        kept += stretch if len(stretch) <= 4 else [*stretch[:2], _LEFT_OUT, *stretch[-2:]]
        stretch = []
        kept += [line] if line else []
    return kept


def excerpt(shown: tuple[str, ...], lines: list[str]) -> list[str]:
    """The lines that the page shows, as they are printed now, and `…` where others are left out."""
    if _CTRL_C in shown and _CTRL_C in lines:
        here, there = shown.index(_CTRL_C), lines.index(_CTRL_C)
        after = excerpt(shown[here + 1 :], lines[there + 1 :])
        return [*excerpt(shown[:here], lines[:there]), _CTRL_C, *after]
    kept, at = [], 0
    for old in shown:
        if old == _LEFT_OUT:
            kept.append(old)
            continue
        alike = [n for n in range(at, len(lines)) if _wording(lines[n]) == _wording(old)]
        if not alike:
            sys.exit(f"not printed (any more): {old!r}")
        nearest = max(alike, key=lambda n: _num_equal(lines[n], old))
        kept.append(lines[nearest])
        at = nearest + 1
    return kept


def _num_equal(line: str, other: str) -> int:
    """How many characters they begin with alike."""
    return sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(line, other, strict=False))
    )


def _wording(line: str) -> str:
    return " ".join(_NUMBER.sub("#", line).split())


def differences(old: str, new: str) -> list[str]:
    """What the commands said otherwise than the page, where it matters."""
    found = []
    for before, after in zip(_STEP.finditer(old), _STEP.finditer(new), strict=True):
        if not before["block"]:
            continue
        last = [_wording(block["block"].splitlines()[-1]) for block in (before, after)]
        if last[0] != last[1]:
            found.append(f"{last[1]!r} instead of {last[0]!r}")
        if len(set(re.findall(r"[0-9a-f]{64}", after["block"]))) > 1:
            found.append(f"hashes differ:\n{after['block']}")
    return found + [f"nobody said {each!r}" for each in _KEPT if each in old and each not in new]


if __name__ == "__main__":
    path, workplace = Path(sys.argv[1]), Path(sys.argv[2])
    os.environ["PAGES"] = str(path.parent.resolve())
    page = path.read_text()
    now = played(page, workplace)
    if "--write" in sys.argv[3:]:
        path.write_text(now)
    elif differ := differences(page, now):
        sys.exit("\n".join(differ))

"""Stacks: what each thread of a rank was doing when it was asked, as faulthandler writes it down.

    Current thread 0x00007f30 (most recent call first):
      File "/home/ada/train.py", line 31 in loss
      File "…/drivetrain/train/loop.py", line 103 in _go_through

Below a line `process 812:` are the stacks of a process that the rank has started (a data worker).
"""

from __future__ import annotations

import pkgutil
import re
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

# What is not the user's own: installed libraries, the standard library, and our own packages, by
# name: a stack may come from another host, with other paths.
_PACKAGES = pkgutil.iter_modules([str(Path(__file__).parents[1])])
_OURS = "|".join(package.name for package in _PACKAGES if package.ispkg)
_LIBRARY = re.compile(rf"(site|dist)-packages|/lib/python3|^<|/drivetrain/({_OURS})/")
_STANDARD = sysconfig.get_paths()["stdlib"]
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<function>.+)')
_CALL, _BELOW_CALL = '  File "', "    "
"""How a Python traceback's calls begin, and the lines of source below them."""
_PROCESS = re.compile(r"^process (\d+):$")
_TELLS = "drivetrain/supervise/failures/dump_responder.py"
"""Where the thread that writes a rank's stacks down is while it does."""


@dataclass(frozen=True)
class Frame:
    """One call."""

    file: str
    line: int
    function: str

    @property
    def is_users(self) -> bool:
        """Neither a library's nor ours."""
        return not _LIBRARY.search(self.file) and not self.file.startswith(_STANDARD)

    def __str__(self) -> str:
        name = self.file.rpartition("/")[2]
        return f"{name}:{self.line} in {self.function}"


@dataclass(frozen=True)
class Thread:
    """The calls of one thread, innermost first."""

    frames: tuple[Frame, ...]
    is_current: bool = False

    def is_in(self, file: str, *functions: str) -> bool:
        """Whether one of the calls is there."""
        return any(
            file in frame.file and (not functions or frame.function in functions)
            for frame in self.frames
        )

    @property
    def is_in_collective(self) -> bool:
        """As far as its Python calls show: backward waits for gradients to travel."""
        return self.is_in("torch/distributed/") or self.is_in("torch/autograd/graph.py")

    @property
    def call_of_torch_distributed(self) -> str:
        """The function of torch.distributed that the script has called; empty when in none."""
        calls = [frame.function for frame in self.frames if "torch/distributed/" in frame.file]
        return next((name for name in reversed(calls) if name != "wrapper"), "")

    @property
    def user_frame(self) -> Frame | None:
        """The innermost call in the user's own code."""
        return innermost_users(self.frames)


@dataclass(frozen=True)
class Stacks:
    """All threads of one rank, and of the processes it has started."""

    threads: tuple[Thread, ...]
    children: tuple[tuple[int, tuple[Thread, ...]], ...] = ()
    """(process id, its threads)"""

    @property
    def main(self) -> Thread | None:
        """The thread that runs the script; of several that could be it, the one that answered."""
        return main_thread(self.threads)


def parse_stacks(text: str) -> Stacks | None:
    """None when there is nothing: the process could not answer."""
    own, *rest = _by_process(text.splitlines())
    threads = _threads(own[1])
    if not threads:
        return None
    return Stacks(threads, tuple((pid, _threads(lines)) for pid, lines in rest))


def innermost_users(frames: Iterable[Frame]) -> Frame | None:
    """Of calls, innermost first, the first in the user's own code."""
    return next((frame for frame in frames if frame.is_users), None)


def traceback_line(error: str) -> Frame | None:
    """The innermost call in the user's own code, of a Python traceback (innermost last)."""
    return innermost_users(
        reversed([frame for line in error.splitlines() if (frame := _frame(line))])
    )


def own_calls(error: str) -> str:
    """A Python traceback with the user's own calls, and the one that raised; the rest left out.

    Without a call of the user's own it stays as it is.
    """
    lines = error.splitlines()
    calls = [number for number, line in enumerate(lines) if line.startswith(_CALL)]
    if not any(_is_users(lines[number]) for number in calls):
        return error
    kept, keeps = [], True
    for number, line in enumerate(lines):
        if line.startswith(_CALL):
            keeps = _is_users(line) or _raises(lines, number)
        elif not line.startswith(_BELOW_CALL):
            keeps = True
        if keeps:
            kept.append(line)
    return "\n".join(kept)


def _is_users(line: str) -> bool:
    frame = _frame(line)
    return frame is not None and frame.is_users


def _raises(lines: Sequence[str], number: int) -> bool:
    """Whether a call is the innermost: below its source comes the exception."""
    below = next((line for line in lines[number + 1 :] if not line.startswith(_BELOW_CALL)), "")
    return not below.startswith(_CALL)


def main_thread(threads: Sequence[Thread]) -> Thread | None:
    """The script's own thread was started by our worker, or by runpy in a script's own process."""
    scripts = [
        t
        for t in threads
        if t.is_in("runpy") or t.is_in("drivetrain/supervise/processes/worker.py")
    ]
    current = [t for t in threads if t.is_current]
    return next(iter([*scripts, *current, *reversed(threads)]), None)  # the oldest comes last


def _by_process(lines: Sequence[str]) -> list[tuple[int, list[str]]]:
    parts: list[tuple[int, list[str]]] = [(0, [])]
    for line in lines:
        if found := _PROCESS.match(line):
            parts.append((int(found[1]), []))
        else:
            parts[-1][1].append(line)
    return parts


def _threads(lines: Iterable[str]) -> tuple[Thread, ...]:
    threads: list[tuple[bool, list[Frame]]] = []
    for line in lines:
        if "(most recent call first)" in line:
            threads.append((line.startswith("Current"), []))
        elif threads and (frame := _frame(line)):
            threads[-1][1].append(frame)
    found = (Thread(tuple(frames), is_current) for is_current, frames in threads)
    return tuple(thread for thread in found if not thread.is_in(_TELLS))


def _frame(line: str) -> Frame | None:
    found = _FRAME.search(line)
    return Frame(found["file"], int(found["line"]), found["function"]) if found else None

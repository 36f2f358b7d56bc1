"""Stacks: what each thread of a rank was doing, in faulthandler's format.

    Current thread 0x00007f30 (most recent call first):
      File "/home/ada/train.py", line 31 in loss
      File "…/drivetrain/train/loop.py", line 103 in _go_through

Below a line `process 812:` are the stacks of a process that the rank started (a data worker).
"""

from __future__ import annotations

import pkgutil
import re
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

# Everything but the user's code: installed libraries, the standard library, and our own packages.
# Matched by name, since a stack may come from another host with different paths.
_PACKAGES = pkgutil.iter_modules([str(Path(__file__).parents[1])])
_OURS = "|".join(package.name for package in _PACKAGES if package.ispkg)
_LIBRARY = re.compile(rf"(site|dist)-packages|/lib/python3|^<|/drivetrain/({_OURS})/")
_STANDARD = sysconfig.get_paths()["stdlib"]
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<function>.+)')
_CALL, _BELOW_CALL = '  File "', "    "
"""Prefixes of a call in a Python traceback and of the source lines below it."""
_PROCESS = re.compile(r"^process (\d+):$")
_STARTS = re.compile(r"^<frozen |/drivetrain/supervise/processes/")
"""Calls that only start a script or import a module: Python's own, and our worker's."""
_TELLS = "drivetrain/supervise/failures/dump_responder.py"
"""The file of the thread that dumps a rank's stacks."""


@dataclass(frozen=True)
class Frame:
    """One call of a stack."""

    file: str
    line: int
    function: str

    @property
    def is_users(self) -> bool:
        """True if the file belongs neither to a library nor to Drivetrain."""
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
        """Whether one of the calls is in `file` and, if given, in one of `functions`."""
        return any(
            file in frame.file and (not functions or frame.function in functions)
            for frame in self.frames
        )

    @property
    def is_in_collective(self) -> bool:
        """Judged by its Python calls; backward counts, since it waits for gradients to be sent."""
        return self.is_in("torch/distributed/") or self.is_in("torch/autograd/graph.py")

    @property
    def call_of_torch_distributed(self) -> str:
        """The torch.distributed function that the script called; empty if none."""
        calls = [frame.function for frame in self.frames if "torch/distributed/" in frame.file]
        return next((name for name in reversed(calls) if name != "wrapper"), "")

    @property
    def user_frame(self) -> Frame | None:
        """The innermost call in the user's own code."""
        return innermost_users(self.frames)

    @property
    def shown(self) -> tuple[Frame, ...]:
        """The calls for people: without those that only start the script or import a module."""
        return tuple(frame for frame in self.frames if not _STARTS.search(frame.file))


@dataclass(frozen=True)
class Stacks:
    """All threads of one rank and of the processes it started."""

    threads: tuple[Thread, ...]
    children: tuple[tuple[int, tuple[Thread, ...]], ...] = ()
    """(process id, its threads)"""

    @property
    def main(self) -> Thread | None:
        """The thread that runs the script; if several could be, the one that responded."""
        return main_thread(self.threads)


def parse_stacks(text: str) -> Stacks | None:
    """Parse a rank's dump; None if it is empty because the process could not respond."""
    own, *rest = _by_process(text.splitlines())
    threads = _threads(own[1])
    if not threads:
        return None
    return Stacks(threads, tuple((pid, _threads(lines)) for pid, lines in rest))


def innermost_users(frames: Iterable[Frame]) -> Frame | None:
    """Return the first call in the user's code, given calls with the innermost first."""
    return next((frame for frame in frames if frame.is_users), None)


def traceback_line(error: str) -> Frame | None:
    """Return the innermost call in the user's code in a Python traceback (innermost last)."""
    return innermost_users(
        reversed([frame for line in error.splitlines() if (frame := _frame(line))])
    )


def own_calls(error: str) -> str:
    """Reduce a Python traceback to the user's calls and the one that raised.

    A traceback without calls in the user's code is returned unchanged.
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
    """Whether a call is the innermost one, which the exception follows."""
    below = next((line for line in lines[number + 1 :] if not line.startswith(_BELOW_CALL)), "")
    return not below.startswith(_CALL)


def main_thread(threads: Sequence[Thread]) -> Thread | None:
    """Return the thread that runs the script, started by our worker or by runpy."""
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

"""RankDump: what the ranks of a node say when they are asked what they are doing.

Asked together, waited for together, and never for long: a stopped process says nothing.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from drivetrain.supervise.failures.dump_responder import ASK, COLLECTIVES, STACKS, STACKS_SIGNAL

_PATIENCE_S = 2.0
_CHILDS_PATIENCE_S = 0.5
_MOST_CHILDREN = 16


@dataclass(frozen=True)
class RankDump:
    """One rank's."""

    stacks: str
    """Empty when it did not answer."""
    collectives: str
    """JSON; empty when there are none."""


class DumpRequest(Protocol):
    """A rank's process."""

    local_rank: int

    @property
    def pid(self) -> int:
        """Its process id."""
        ...


@dataclass(frozen=True)
class DumpFiles:
    """Where a rank's answers go, in the node's session."""

    session: Path
    local_rank: int

    @property
    def stacks(self) -> Path:
        """As faulthandler writes them."""
        return self.session / f"stacks-{self.local_rank}"

    @property
    def ask(self) -> Path:
        """A named pipe: a byte in it is the question."""
        return self.session / f"ask-{self.local_rank}"

    @property
    def collectives(self) -> Path:
        """Those it has called."""
        return self.session / f"collectives-{self.local_rank}.json"

    def prepare(self) -> dict[str, str]:
        """Clear what an earlier process left; the variables for the next one."""
        for path in (self.stacks, self.ask, self.collectives):
            path.unlink(missing_ok=True)
        os.mkfifo(self.ask)
        return {STACKS: str(self.stacks), ASK: str(self.ask), COLLECTIVES: str(self.collectives)}

    def read(self) -> RankDump:
        """What there is by now."""
        return RankDump(_read(self.stacks), _read(self.collectives))


def collect_dumps(session: Path, living: Sequence[DumpRequest]) -> dict[int, RankDump]:
    """Ask every rank, by local rank; those that have ended may have left something too."""
    files = {rank.pid: DumpFiles(session, rank.local_rank) for rank in living}
    awake = [pid for pid in files if not is_stopped(pid)]
    asked = [pid for pid in awake if _ask(files[pid])]
    _until_still([files[pid].stacks for pid in asked], _PATIENCE_S)
    silent = [pid for pid in awake if _size(files[pid].stacks) == 0 and _answers(pid)]
    for pid in silent:  # something holds Python's lock
        _signal(pid)
    _until_still([files[pid].stacks for pid in silent], _PATIENCE_S)
    _wait(lambda: all(files[pid].collectives.exists() for pid in asked), _PATIENCE_S)
    for pid in awake:
        for child in _children(pid)[:_MOST_CHILDREN]:
            _collect_child(child, files[pid].stacks)
    return {rank.local_rank: files[rank.pid].read() for rank in living}


def _ask(files: DumpFiles) -> bool:
    """Whether somebody listens: the script may not have begun, or be over."""
    try:
        with open(os.open(files.ask, os.O_WRONLY | os.O_NONBLOCK), "wb", buffering=0) as pipe:
            os.truncate(files.stacks, 0)  # what it said when it was asked before
            pipe.write(b"?")
    except OSError:
        return False
    return True


def _signal(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, STACKS_SIGNAL)


def _collect_child(pid: int, stacks: Path) -> None:
    """A forked data worker has the same handler and writes to the same file, but no thread."""
    with open(stacks, "a") as file:
        file.write(f"process {pid}:\n")
    size = _size(stacks)
    _signal(pid)
    _until_still([stacks], _CHILDS_PATIENCE_S, at_least=size + 1)


def _children(pid: int) -> list[int]:
    """Processes a rank has started that would answer."""
    try:
        tasks = Path(f"/proc/{pid}/task")
        found = " ".join((task / "children").read_text() for task in tasks.iterdir()).split()
    except OSError:
        return []
    return [int(child) for child in found if _answers(int(child))]


def _answers(pid: int) -> bool:
    """Whether it handles the signal, which would end it otherwise."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next((line for line in status.splitlines() if line.startswith("SigCgt:")), "SigCgt: 0")
    return bool(int(caught.split()[1], 16) >> (STACKS_SIGNAL - 1) & 1) and not is_stopped(pid)


def _until_still(paths: Sequence[Path], patience_s: float, at_least: int = 1) -> None:
    """Until every file has something in it and nobody is still writing."""
    sizes: list[int] = []

    def is_still() -> bool:
        nonlocal sizes
        before, sizes = sizes, [_size(path) for path in paths]
        return all(size >= at_least for size in sizes) and sizes == before

    _wait(is_still, patience_s)


def _wait(is_over: Callable[[], bool], patience_s: float) -> None:
    deadline_s = time.monotonic() + patience_s
    while not is_over() and time.monotonic() < deadline_s:
        time.sleep(0.05)


def kernel_state(pid: int) -> tuple[str, int] | None:
    """How the system calls its state (T: stopped, Z: ended), and its parent; None when gone."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except (OSError, ValueError):
        return None
    return state, int(parent)


def is_stopped(pid: int) -> bool:
    """Whether a process cannot answer: SIGSTOP, or a debugger."""
    found = kernel_state(pid)
    return found is not None and found[0] in ("T", "t")


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0

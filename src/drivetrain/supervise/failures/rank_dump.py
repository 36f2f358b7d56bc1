"""RankDump: the stacks and collectives of the ranks of a node, collected on request.

All ranks are asked at the same time, with a short timeout: a stopped process does not answer.
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
    """The dump of one rank."""

    stacks: str
    """Empty if the rank did not answer."""
    collectives: str
    """JSON; empty if there are none."""


class DumpRequest(Protocol):
    """A rank's process that is asked for a dump."""

    local_rank: int

    @property
    def pid(self) -> int:
        """The process id."""
        ...


@dataclass(frozen=True)
class DumpFiles:
    """The files of a rank's dump in the node's session directory."""

    session: Path
    local_rank: int

    @property
    def stacks(self) -> Path:
        """The stacks, as faulthandler writes them."""
        return self.session / f"stacks-{self.local_rank}"

    @property
    def ask(self) -> Path:
        """A named pipe: one byte in it requests a dump."""
        return self.session / f"ask-{self.local_rank}"

    @property
    def collectives(self) -> Path:
        """The collectives that the rank has called."""
        return self.session / f"collectives-{self.local_rank}.json"

    def prepare(self) -> dict[str, str]:
        """Remove what an earlier process left; return the variables for the next one."""
        for path in (self.stacks, self.ask, self.collectives):
            path.unlink(missing_ok=True)
        os.mkfifo(self.ask)
        return {STACKS: str(self.stacks), ASK: str(self.ask), COLLECTIVES: str(self.collectives)}

    def read(self) -> RankDump:
        """Return what has been written so far."""
        return RankDump(_read(self.stacks), _read(self.collectives))


def collect_dumps(session: Path, living: Sequence[DumpRequest]) -> dict[int, RankDump]:
    """Ask all ranks for a dump; return the dumps by local rank."""
    files = {rank.pid: DumpFiles(session, rank.local_rank) for rank in living}
    awake = [pid for pid in files if not is_stopped(pid)]
    asked = [pid for pid in awake if _ask(files[pid])]
    _until_still([files[pid].stacks for pid in asked], _PATIENCE_S)
    silent = [pid for pid in awake if _size(files[pid].stacks) == 0 and _answers(pid)]
    for pid in silent:  # something holds the GIL
        _signal(pid)
    _until_still([files[pid].stacks for pid in silent], _PATIENCE_S)
    _wait(lambda: all(files[pid].collectives.exists() for pid in asked), _PATIENCE_S)
    for pid in awake:
        for child in _children(pid)[:_MOST_CHILDREN]:
            _collect_child(child, files[pid].stacks)
    return {rank.local_rank: files[rank.pid].read() for rank in living}


def _ask(files: DumpFiles) -> bool:
    """Request a dump; False if no thread listens, before the script starts or after it ends."""
    try:
        with open(os.open(files.ask, os.O_WRONLY | os.O_NONBLOCK), "wb", buffering=0) as pipe:
            os.truncate(files.stacks, 0)  # the previous dump
            pipe.write(b"?")
    except OSError:
        return False
    return True


def _signal(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, STACKS_SIGNAL)


def _collect_child(pid: int, stacks: Path) -> None:
    """Signal a forked data worker: it has the same handler and file, but no listening thread."""
    with open(stacks, "a") as file:
        file.write(f"process {pid}:\n")
    size = _size(stacks)
    _signal(pid)
    _until_still([stacks], _CHILDS_PATIENCE_S, at_least=size + 1)


def _children(pid: int) -> list[int]:
    """Return the child processes of a rank that would answer."""
    try:
        tasks = Path(f"/proc/{pid}/task")
        found = " ".join((task / "children").read_text() for task in tasks.iterdir()).split()
    except OSError:
        return []
    return [int(child) for child in found if _answers(int(child))]


def _answers(pid: int) -> bool:
    """True if the process handles the signal, which would kill it otherwise."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next((line for line in status.splitlines() if line.startswith("SigCgt:")), "SigCgt: 0")
    return bool(int(caught.split()[1], 16) >> (STACKS_SIGNAL - 1) & 1) and not is_stopped(pid)


def _until_still(paths: Sequence[Path], patience_s: float, at_least: int = 1) -> None:
    """Wait until all files have content and have stopped growing."""
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
    """Return the state (T: stopped, Z: ended) and parent of a process; None if it is gone."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except (OSError, ValueError):
        return None
    return state, int(parent)


def is_stopped(pid: int) -> bool:
    """True if a process is stopped, by SIGSTOP or a debugger, and so cannot answer."""
    found = kernel_state(pid)
    return found is not None and found[0] in ("T", "t")


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0

"""Session: what the processes of one node share with the supervisor that started them.

A folder of the node, named by an environment variable; without it a process runs on its own and
nothing here does anything. A rank writes one small page: the step it has finished and what it is
doing. The supervisor reads it; nobody waits for anybody.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import time
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Self

from drivetrain.core.files import write_whole

SESSION = "DRIVETRAIN_SESSION"
RUN_DIR = "DRIVETRAIN_RUN_DIR"
ACCEPT_CHANGE = "DRIVETRAIN_ACCEPT_CHANGE"
"""Terms of a run's contract that may differ from its checkpoint's, separated by commas."""
NODE_SESSION = "DRIVETRAIN_NODE_SESSION"
"""From the guardian to its supervisor: a session that outlives the supervisor."""
COMMAND_S = "DRIVETRAIN_COMMAND_S"
"""When the command began that this process belongs to."""
LAUNCHED_S = "DRIVETRAIN_LAUNCHED_S"
"""When the supervisor started the ranks of this attempt."""
TRAINS = "trains"
_PAGE = struct.Struct("<qqqqqq")
"""step, phase, process id, time in ns, the slowest recent step in ns, whether it compiles"""
_FADING = 0.99
"""By each step: one slow step is forgotten after some hundreds."""


class Phase(IntEnum):
    """What a rank is doing; only steps are expected to be quick."""

    STARTING = 0
    STEPPING = 1
    SAVING = 2
    EVALUATING = 3
    ENDED = 4


@dataclass(frozen=True)
class RankProgress:
    """What one rank last wrote."""

    step: int
    phase: Phase
    pid: int
    at_s: float
    """On the node's monotonic clock."""
    slowest_step_s: float = 0.0
    """Of its recent ones, by the rank's own clock; 0 before it has taken a whole step."""
    is_compiling: bool = False
    """Whatever its phase: any of them may have to wait for torch.compile."""


class ProgressPage:
    """A rank's page in memory that survives it; writing it takes well under a microsecond."""

    def __init__(self, path: Path | None) -> None:
        self._pid = os.getpid()
        self._step, self._phase = 0, Phase.STARTING
        self._at_ns = self._slowest_ns = 0
        self._is_compiling = False
        self._map: mmap.mmap | None = None
        if path is not None:
            with open(path, "a+b") as file:
                file.truncate(_PAGE.size)
                self._map = mmap.mmap(file.fileno(), _PAGE.size)
            self.note(Phase.STARTING)

    @classmethod
    def of_this_rank(cls, local_rank: int) -> Self:
        """The page the supervisor watches, or one that nobody does."""
        session = os.environ.get(SESSION)
        return cls(None if session is None else page_path(Path(session), local_rank))

    def note(self, phase: Phase, step: int | None = None) -> None:
        """Say what this rank does now, and after which step."""
        now_ns = time.monotonic_ns()
        if step is not None:
            num_steps = step - self._step
            if num_steps > 0 and self._phase is phase is Phase.STEPPING:
                took_ns = (now_ns - self._at_ns) // num_steps
                self._slowest_ns = max(took_ns, int(_FADING * self._slowest_ns))
            self._step = step
        self._phase = phase
        self._write(now_ns)

    def compiling(self, *, now: bool) -> None:
        """Say that torch compiles, or that it is done; what it took is not the step's own time."""
        self._is_compiling = now
        self._write(time.monotonic_ns())

    def _write(self, now_ns: int) -> None:
        self._at_ns = now_ns
        if self._map is not None:
            # one assignment: pack_into() would clear the page first, and a reader would see that
            self._map[:] = _PAGE.pack(
                self._step, self._phase, self._pid, now_ns, self._slowest_ns, self._is_compiling
            )

    def close(self) -> None:
        if self._map is not None:
            self._map.close()
            self._map = None


def page_path(session: Path, local_rank: int) -> Path:
    """Where a rank's page lies."""
    return session / f"progress-{local_rank}"


def read_progress(session: Path, local_rank: int) -> RankProgress | None:
    """What a rank last wrote; None before it wrote anything."""
    try:
        descriptor = os.open(page_path(session, local_rank), os.O_RDONLY)
    except OSError:
        return None
    try:  # ten times a second for every rank: a file object would take as long as all the rest
        data = os.pread(descriptor, _PAGE.size, 0)
        while data != (again := os.pread(descriptor, _PAGE.size, 0)):  # it was being written
            data = again
    except OSError:
        return None
    finally:
        os.close(descriptor)
    if len(data) < _PAGE.size or not any(data):
        return None
    step, phase, pid, at_ns, slowest_ns, compiles = _PAGE.unpack(data)
    return RankProgress(step, Phase(phase), pid, at_ns * 1e-9, slowest_ns * 1e-9, bool(compiles))


_opened = 0


def next_run_directory() -> tuple[Path | None, int]:
    """Where the run that is about to open lives, if that is settled; and its number in the script.

    A script may train more than once: its first run is in the directory that was asked for, the
    next ones beside it.
    """
    global _opened
    number, _opened = _opened, _opened + 1
    return settled_directory(number), number


def beginnings() -> dict[str, float]:
    """When the command began, and when this attempt's processes were started.

    A run that is not the script's first began with its own fit(); so did one in a notebook.
    """
    now_s = time.time()
    if _opened > 1 or hasattr(sys, "ps1") or "ipykernel" in sys.modules:
        return {"command_s": now_s, "launched_s": now_s}
    launched_s = float(os.environ.get(LAUNCHED_S) or process_began_s())
    return {
        "command_s": float(os.environ.get(COMMAND_S) or launched_s),
        "launched_s": launched_s,
    }


def process_began_s() -> float:
    """When this process was started; now, where the system does not say."""
    try:
        after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        began_ticks, uptime_s = int(after_name[19]), Path("/proc/uptime").read_text().split()[0]
        age_s = float(uptime_s) - began_ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return time.time()
    return time.time() - age_s


def earlier_directory() -> Path | None:
    """The same without opening it: where the next run would go on."""
    return settled_directory(_opened)


def settled_directory(number: int) -> Path | None:
    """The directory of the script's n-th run, by --run-dir or from an earlier attempt."""
    given = os.environ.get(RUN_DIR)
    if given:
        return Path(given if number == 0 else f"{given}-{number + 1}")
    session = os.environ.get(SESSION)
    if session is None:
        return None
    try:
        return Path((Path(session) / f"run-{number}").read_text())
    except OSError:
        return None


def mark_training() -> None:
    """Tell the supervisor that this script trains with Drivetrain, and so can be resumed."""
    session = os.environ.get(SESSION)
    if session is not None:
        (Path(session) / TRAINS).touch()


def remember_attempt(number: int) -> None:
    """For the supervisor, which writes down how the attempt ends."""
    session = os.environ.get(SESSION)
    if session is not None:
        (Path(session) / "attempt").write_text(str(number))


def remember_directory(number: int, path: Path) -> None:
    """For the next attempt, and for the supervisor."""
    session = os.environ.get(SESSION)
    if session is not None:
        write_whole(Path(session) / f"run-{number}", str(path))

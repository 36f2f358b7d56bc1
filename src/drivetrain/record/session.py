"""Session: what the processes of one node share with the supervisor that started them.

It is a local directory, named by an environment variable; without it a process runs on its own and
nothing here has an effect. Each rank writes one small page: the step it has finished and what it is
doing. The supervisor reads the pages; neither side waits for the other.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
import time
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, Self

from drivetrain.core.files import write_whole
from drivetrain.core.processes import is_interactive

SESSION = "DRIVETRAIN_SESSION"
RUN_DIR = "DRIVETRAIN_RUN_DIR"
ACCEPT_CHANGE = "DRIVETRAIN_ACCEPT_CHANGE"
"""Settings that may differ from the checkpoint's, separated by commas."""
NODE_SESSION = "DRIVETRAIN_NODE_SESSION"
"""Set by the guardian for its supervisor: a session that outlives the supervisor."""
COMMAND_S = "DRIVETRAIN_COMMAND_S"
"""When the command of this process began."""
LAUNCHED_S = "DRIVETRAIN_LAUNCHED_S"
"""When the supervisor started the ranks of this attempt."""
TRAINS = "trains"
_KEEPS_ALL = "keeps all checkpoints in its run directory"
ATTEMPT, LAST_ATTEMPT = "attempt", "last-attempt"
"""The number of the attempt that the ranks have opened, and of the one before they were started."""
_LOST_STARTS = "lost-starts"
_PAGE = struct.Struct("<qqqqqq")
"""step, phase, process id, time in ns, the slowest recent step in ns, whether it compiles"""
_FADING = 0.99
"""Decay per step: a slow step is forgotten after a few hundred steps."""


class Phase(IntEnum):
    """What a rank is doing; only steps are expected to be quick."""

    STARTING = 0
    STEPPING = 1
    SAVING = 2
    EVALUATING = 3
    ENDED = 4


@dataclass(frozen=True)
class RankProgress:
    """What one rank wrote last."""

    step: int
    phase: Phase
    pid: int
    at_s: float
    """On the node's monotonic clock."""
    slowest_step_s: float = 0.0
    """Its slowest recent step by its own clock; 0 before it has completed one."""
    is_compiling: bool = False
    """Independent of the phase: any of them may have to wait for torch.compile."""


class ProgressPage:
    """A rank's memory-mapped page, which survives it; a write takes well under a microsecond."""

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
        """Return the page that the supervisor reads, or a dummy without a supervisor."""
        session = os.environ.get(SESSION)
        return cls(None if session is None else page_path(Path(session), local_rank))

    def note(self, phase: Phase, step: int | None = None) -> None:
        """Write what this rank is doing, and after which step."""
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
        """Write whether torch is compiling, which does not count as the step's own time."""
        self._is_compiling = now
        self._write(time.monotonic_ns())

    def _write(self, now_ns: int) -> None:
        self._at_ns = now_ns
        if self._map is not None:
            # one assignment: pack_into() would clear the page first, visibly for the reader
            self._map[:] = _PAGE.pack(
                self._step, self._phase, self._pid, now_ns, self._slowest_ns, self._is_compiling
            )

    def close(self) -> None:
        if self._map is not None:
            self._map.close()
            self._map = None


def page_path(session: Path, local_rank: int) -> Path:
    """Return the path of a rank's page."""
    return session / f"progress-{local_rank}"


def read_progress(session: Path, local_rank: int) -> RankProgress | None:
    """Return what a rank wrote last; None before it has written anything."""
    try:
        descriptor = os.open(page_path(session, local_rank), os.O_RDONLY)
    except OSError:
        return None
    try:  # called ten times a second per rank: a file object would double the cost
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
    """Return the directory of the run about to open, if determined, and its number in the script.

    A script may train more than once: its first run uses the requested directory, the next ones
    use directories beside it.
    """
    global _opened
    number, _opened = _opened, _opened + 1
    return settled_directory(number), number


def is_first_run() -> bool:
    """True unless this script has begun more than one run."""
    return _opened <= 1


def beginnings() -> dict[str, Any]:
    """Return when the command began, when this attempt's processes were started, and lost starts.

    A run that is not the script's first, or is in a notebook, began with its own fit().
    """
    now_s = time.time()
    if _opened > 1 or is_interactive():
        return {"command_s": now_s, "launched_s": now_s}
    launched_s = float(os.environ.get(LAUNCHED_S) or process_began_s())
    lost = _lost_starts()
    return {
        "command_s": float(os.environ.get(COMMAND_S) or launched_s),
        "launched_s": launched_s,
        **({"lost_starts": lost} if lost else {}),
    }


def note_lost_start(session: Path, how: str) -> None:
    """Keep how a start ended that opened no attempt: the next attempt's facts name it."""
    with contextlib.suppress(OSError), (session / _LOST_STARTS).open("a") as file:
        file.write(json.dumps(how) + "\n")


def _lost_starts() -> list[str]:
    """Return how each start ended since the last attempt was opened."""
    session = os.environ.get(SESSION)
    try:
        lines = (Path(session) / _LOST_STARTS).read_text().splitlines() if session else []
        return [str(json.loads(line)) for line in lines]
    except (OSError, ValueError):
        return []


def launcher_of(environment: str) -> str:
    """Return who started this process; `environment` names only whose variables it has."""
    if environment == "single process":
        return "none (one process)"
    if environment == "torchrun" and SESSION in os.environ:
        return "drivetrain train"
    if environment == "torchrun" and "TORCHELASTIC_RUN_ID" not in os.environ:
        return "environment variables (RANK, WORLD_SIZE)"
    return environment


def process_began_s() -> float:
    """Return when this process was started, or now if the system does not tell."""
    try:
        after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        began_ticks, uptime_s = int(after_name[19]), Path("/proc/uptime").read_text().split()[0]
        age_s = float(uptime_s) - began_ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return time.time()
    return time.time() - age_s


def earlier_directory() -> Path | None:
    """Return the directory where the next run would resume, without opening it."""
    return settled_directory(_opened)


def settled_directory(number: int) -> Path | None:
    """Return the directory of the script's n-th run, from --run-dir or an earlier attempt."""
    given = os.environ.get(RUN_DIR)
    if given:
        return Path(given if number == 0 else f"{given}-{number + 1}")
    session = os.environ.get(SESSION)
    if session is None:
        return None
    return run_directory_in(Path(session), number)


def run_directory_in(session: Path, number: int = 0) -> Path | None:
    """Return the directory of a script's n-th run, if it has begun."""
    try:
        return Path((session / f"run-{number}").read_text())
    except OSError:
        return None


def mark_training(*, keeps_all: bool = False) -> None:
    """Tell the supervisor that this script trains with Drivetrain, and so can be resumed.

    `keeps_all`: all checkpoints it could start from are in its run's directory.
    """
    session = os.environ.get(SESSION)
    if session is not None:
        (Path(session) / TRAINS).write_text(_KEEPS_ALL if keeps_all else "")


def keeps_all_in_run(session: Path) -> bool:
    """Whether a run that has no checkpoint in its directory certainly has none."""
    try:
        return (session / TRAINS).read_text() == _KEEPS_ALL
    except OSError:
        return False


def remember_attempt(number: int) -> None:
    """Tell the supervisor the attempt's number, so that it can record how it ends."""
    session = os.environ.get(SESSION)
    if session is not None:
        (Path(session) / ATTEMPT).write_text(str(number))
        (Path(session) / _LOST_STARTS).unlink(missing_ok=True)  # they are in its facts


def forget_attempt(session: Path) -> None:
    """Set aside the last attempt's number: ranks that start have not opened an attempt yet."""
    with contextlib.suppress(FileNotFoundError):
        (session / ATTEMPT).rename(session / LAST_ATTEMPT)


def remember_directory(number: int, path: Path) -> None:
    """Store a run's directory for the next attempt and for the supervisor."""
    session = os.environ.get(SESSION)
    if session is not None:
        write_whole(Path(session) / f"run-{number}", str(path))

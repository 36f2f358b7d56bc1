"""The coordinator: starts the members of a job, restarts lost ones, and ends them together.

    python -m drivetrain.launch.coordinator.coordinator RUN_DIR

It runs in the background on the client as long as the job does, holds a lock in the run directory
meanwhile, and records there how the job ended. The members' supervisors make all decisions about
the run; the coordinator only does for plain machines what a scheduler does elsewhere.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from drivetrain.core.files import write_whole
from drivetrain.launch import ownership
from drivetrain.launch.coordinator.member import (
    FILE,
    LOGS,
    Member,
    hold_coordinator_lock,
    read_members,
)
from drivetrain.launch.ownership import check_own

END = "conductor-end.json"

RESUME_ME = 75
_LOST = 255
"""ssh's own exit code: the connection failed, not the command."""
_TICK_S = 0.1
_MORE_S = 15.0
"""In addition to the time for saving: for the others to notice that a member has failed."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_MOST_RESTARTS = 1000


@dataclass
class _MemberProcess:
    """A member and its process."""

    member: Member
    log: Path
    secrets: dict[str, str] = field(default_factory=dict, repr=False)
    process: subprocess.Popen[bytes] | None = None
    code: int | None = None
    restarts: int = 0
    pause_s: float = _FIRST_PAUSE_S
    started_s: float = 0.0
    again_s: float | None = None

    def start(self) -> None:
        self.code, self.again_s, self.started_s = None, None, time.monotonic()
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                self.member.command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C on the client must not reach them
            )
        if self.secrets and self.process.stdin is not None:
            with contextlib.suppress(OSError):  # it has ended: the next poll sees that
                self.process.stdin.write(json.dumps(self.secrets).encode() + b"\n")
                self.process.stdin.flush()

    def look(self, *, may_restart: bool) -> None:
        """Poll the process; schedule a restart, or do it when it is due."""
        now_s = time.monotonic()
        if self.again_s is not None and now_s > self.again_s and may_restart:
            self.start()
        if self.process is None or self.code is not None or self.again_s is not None:
            return
        code = self.process.poll()
        if code in (RESUME_ME, _LOST) and may_restart and self.restarts < _MOST_RESTARTS:
            if now_s - self.started_s > 60:
                self.pause_s = _FIRST_PAUSE_S
            self.restarts += 1
            self.again_s = now_s + self.pause_s
            self.pause_s = min(2 * self.pause_s, _LONGEST_PAUSE_S)
            self.say(f"{_why(code)}; restarting it")
            return
        self.code = code

    def let_go(self) -> None:
        """Close its standard input, which asks it to save and stop."""
        if self.again_s is not None:
            self.again_s, self.code = None, RESUME_ME
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def say(self, text: str) -> None:
        with self.log.open("a") as output:
            output.write(f"[{self.member.host}] {text}\n")


@dataclass
class _Coordinator:
    playing: list[_MemberProcess]
    grace_s: float
    asked: bool = False
    deadline_s: float | None = None

    def run(self) -> int:
        for one in self.playing:
            one.start()
        while any(one.code is None for one in self.playing):
            time.sleep(_TICK_S)
            failed = any(one.code not in (None, 0, RESUME_ME) for one in self.playing)
            for one in self.playing:
                one.look(may_restart=not self.asked and not failed)
            if (failed or self.asked) and self.deadline_s is None:
                self.deadline_s = time.monotonic() + self.grace_s + _MORE_S
                if self.asked:
                    self._let_go()
            if self.deadline_s is not None and time.monotonic() > self.deadline_s:
                self._end()
        codes = [one.code or 0 for one in self.playing]
        bad = [code for code in codes if code not in (0, RESUME_ME)]
        return bad[0] if bad else max(codes)

    def ask(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self.asked = True

    def _let_go(self) -> None:
        for one in self.playing:
            one.let_go()

    def _end(self) -> None:
        """The time is up: ask the remaining members to stop, then kill them."""
        if not self.asked:
            self.asked, self.deadline_s = True, None
            return
        for one in self.playing:
            one.kill()
            one.code = one.code if one.code is not None else 128 + signal.SIGKILL


def _why(code: int | None) -> str:
    if code == RESUME_ME:
        return "the host asked the run to stop, and it has saved"
    return "the connection to the host was lost"


def coordinate(run_dir: Path) -> int:
    """Run the job that the run directory describes, to its end."""
    lock = hold_coordinator_lock(run_dir)
    if lock is None:
        sys.stderr.write(f"{run_dir}: another coordinator is already running\n")
        return 1
    (run_dir / END).unlink(missing_ok=True)
    check_own(run_dir / FILE)
    content = read_members(run_dir / FILE)
    (run_dir / LOGS).mkdir(exist_ok=True)
    secrets = ownership.read_secrets(run_dir)
    playing = [
        _MemberProcess(m, run_dir / LOGS / f"{m.host}.txt", secrets) for m in content.members
    ]
    coordinator = _Coordinator(playing, content.grace_s)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, coordinator.ask)
    try:
        code = coordinator.run()
    finally:
        for one in playing:
            one.kill()
    write_whole(run_dir / END, json.dumps({"exit_code": code}))
    lock.close()
    return code


if __name__ == "__main__":
    sys.exit(coordinate(Path(sys.argv[1])))

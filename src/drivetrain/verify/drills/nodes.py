"""The nodes of a drill: real commands on this machine, or on hosts with their own networks.

A drill also acts as the scheduler: a node that crashed or was preempted is started again with the
same command, as Slurm or Kubernetes would do.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from drivetrain.config.giving_way import forced_by
from drivetrain.record.session import RankProgress, read_progress
from drivetrain.supervise.failures.rank_dump import kernel_state
from drivetrain.supervise.processes.forking import Forked
from drivetrain.testing.hosts import Host
from drivetrain.verify.drills.clock import SKEW_S
from drivetrain.verify.drills.hooks import FOLDER
from drivetrain.verify.drills.template import Template

_RESUME_ME = 75


@dataclass
class DrillNode:
    """One node: its command, and the processes it has started."""

    index: int
    command: Sequence[str]
    folder: Path
    ranks: int
    host: Host | None = None
    template: Template | None = None
    """The template it is forked from; None: it is started on this machine."""
    forced: tuple[str, ...] = ()
    """Those of the command's settings that the drill has added, as key=value."""
    process: subprocess.Popen[bytes] | Forked | None = None
    skew_s: float = 0.0
    """Error of its clock; only if it is forked from a template."""
    exit_code: int | None = None
    start_again_s: float | None = None

    def start(self) -> None:
        """Start the command, as a scheduler would."""
        own = self.folder / f"node-{self.index}"
        (own / "tmp").mkdir(parents=True, exist_ok=True)
        environment = {
            **os.environ,
            **forced_by(self.forced),
            "TMPDIR": str(own / "tmp"),
            FOLDER: str(self.folder),
            SKEW_S: str(self.skew_s),
            "DRIVETRAIN_HOOKS": ",".join(
                f"drivetrain.verify.drills.hooks:{name}" for name in ("Witness", "Hang")
            ),
            "OMP_NUM_THREADS": "1",
            "PYTHONFAULTHANDLER": "1",
        }
        log = own / "output.txt"
        if self.template is not None:
            self.process = self.template.start(self.command, environment, log)
        else:
            with open(log, "a") as file:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "drivetrain", "train", *self.command],
                    env=environment,
                    stdout=file,
                    stderr=file,
                )
        self.exit_code, self.start_again_s = None, None

    def poll(self) -> bool:
        """Whether it has ended for good; restarts it when due."""
        if self.start_again_s is not None:
            if time.monotonic() > self.start_again_s:
                self.start()
            return False
        if self.exit_code is None and self.process is not None:
            code = self.process.poll()
            if code == _RESUME_ME:
                self.start_again_s = time.monotonic() + 0.3
                return False
            self.exit_code = code
        return self.exit_code is not None

    def crash(self) -> None:
        """End everything on the node; the scheduler restarts it a little later."""
        if self.host is not None:
            self.host.crash()
        self.start_again_s = time.monotonic() + 1.0

    def pages(self) -> list[RankProgress]:
        """The last progress of its living ranks."""
        found = []
        for session in (self.folder / f"node-{self.index}" / "tmp").glob("drivetrain-*"):
            pages = (read_progress(session, rank) for rank in range(self.ranks))
            found += [page for page in pages if page is not None and _lives(page.pid)]
        return found

    def supervisor(self) -> int | None:
        """Process id of the supervisor, which is the guardian's only child."""
        if self.process is None:
            return None
        with contextlib.suppress(OSError):
            path = f"/proc/{self.process.pid}/task/{self.process.pid}/children"
            children = [int(pid) for pid in Path(path).read_text().split()]
            return children[0] if children else None
        return None

    def output(self) -> str:
        return (self.folder / f"node-{self.index}" / "output.txt").read_text()

    def close(self) -> None:
        """Kill it if it is still running."""
        if self.process is not None and self.process.poll() is None:
            supervisor = self.supervisor()
            self.process.kill()
            self.process.wait()
            if supervisor is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(supervisor, signal.SIGKILL)


def _lives(pid: int) -> bool:
    found = kernel_state(pid)
    return found is not None and found[0] != "Z"

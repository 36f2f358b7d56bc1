"""Lab: Horovod on two hosts, started by horovodrun over ssh."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from subprocess import STDOUT

from drivetrain.core.errors import EnvironmentProblem, Problem
from drivetrain.learn.attempt import Shortcoming
from drivetrain.learn.labs import (
    NUM_HOSTS,
    exit_code,
    judge_losses,
    judge_ranks,
    last_step,
    require_hosts,
    require_library,
    why_it_failed,
)
from drivetrain.learn.notes import Note, attempts_of, read_notes
from drivetrain.learn.verdict import Passed
from drivetrain.testing.hosts import Hosts, make_hosts
from drivetrain.testing.ssh import ssh_available, start_sshd

NUM_STEPS = 20
_FINISH_S = 300.0


def check(file: Path) -> Passed:
    require_hosts("lab_horovod")
    require_library("lab_horovod", "horovod", "`make horovod` in a checkout builds it (10 minutes)")
    if reason := ssh_available():
        remedy = "horovodrun reaches the other host by ssh"
        raise EnvironmentProblem([Problem("lab_horovod", reason, remedy, has_value=False)])
    with (
        tempfile.TemporaryDirectory(prefix="lab-", ignore_cleanup_errors=True) as name,
        make_hosts(NUM_HOSTS) as hosts,
        start_sshd(hosts) as ssh,
    ):
        folder = Path(name)
        _train(file, folder, hosts, ssh)
        notes = read_notes(folder)
        saved = sorted(path.name for path in folder.glob("weights-*.pt"))
    return judged(notes, saved)


def _train(file: Path, folder: Path, hosts: Hosts, ssh: str) -> None:
    """Start the training as a user on the first host would."""
    log = folder / "output.txt"
    slots = ",".join(f"{host.name}:1" for host in hosts)
    with log.open("w") as output:
        run = hosts[0].popen(
            [
                _horovodrun(),
                *(
                    "-np",
                    str(NUM_HOSTS),
                    "-H",
                    slots,
                    "--gloo",
                    "--network-interfaces",
                    "eth0",
                    "--disable-cache",
                ),
                *(sys.executable, str(file), str(folder)),
            ],
            env={**os.environ, "PATH": f"{_ssh_first(folder, ssh)}:{os.environ['PATH']}"},
            cwd=folder,
            stdout=output,
            stderr=STDOUT,
        )
    code = exit_code(run, _FINISH_S)
    if code != 0:
        raise why_it_failed(log.read_text(), code)


def _horovodrun() -> str:
    beside = Path(sys.executable).parent / "horovodrun"
    return str(beside) if beside.exists() else shutil.which("horovodrun") or "horovodrun"


def _ssh_first(folder: Path, ssh: str) -> str:
    """Create a folder for PATH with an ssh that uses this lab's keys: horovodrun calls `ssh`."""
    place = folder / "bin"
    place.mkdir()
    program, *options = ssh.split()
    found = shutil.which(program) or program
    own = place / "ssh"
    own.write_text(f'#!/bin/sh\nexec {found} {" ".join(options)} "$@"\n')
    own.chmod(0o755)
    return str(place)


def judged(notes: Sequence[Note], saved: Sequence[str]) -> Passed:
    attempts = attempts_of(notes)
    if not attempts:
        raise Shortcoming("nothing-noted", "note() is called in every step", "it was not called")
    judge_ranks(attempts[0], NUM_HOSTS)
    judge_losses(attempts[0], NUM_STEPS, "wrong-training", f"{NUM_HOSTS} ranks")
    if last_step(notes) != NUM_STEPS:
        found = f"the last is step {last_step(notes)}"
        raise Shortcoming("not-finished", f"{NUM_STEPS} steps", found)
    if list(saved) != ["weights-0.pt"]:
        raise Shortcoming(
            "saved-by-all",
            "the weights are saved once, by rank 0",
            f"files: {', '.join(saved) or 'none'}",
        )
    return Passed(
        [
            f"{NUM_STEPS} losses on {NUM_HOSTS} ranks, each on its own host, as on one process",
            "every rank begins with rank 0's weights, and has the same weights after each step",
            "only rank 0 saves",
        ]
    )

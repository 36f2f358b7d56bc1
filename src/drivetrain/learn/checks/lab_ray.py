"""Lab: Ray Train on a real cluster of two hosts, on which a worker is killed."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from subprocess import STDOUT

from drivetrain.core.requirements import install_command
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
from drivetrain.learn.members import wait_until
from drivetrain.learn.notes import Note, attempts_of, read_notes
from drivetrain.learn.verdict import Passed, Score
from drivetrain.testing.hosts import make_hosts
from drivetrain.testing.ray_cluster import RayCluster, make_ray_cluster

NUM_STEPS = 30
_KILLED_AFTER = 12
_START_S, _FINISH_S = 300.0, 300.0


def check(file: Path) -> Passed:
    require_hosts("lab_ray")
    require_library("lab_ray", "ray", install_command("ray"))
    # Ray's sockets are in its folder, and socket paths have a length limit: use short names
    with (
        tempfile.TemporaryDirectory(prefix="lab-", ignore_cleanup_errors=True) as name,
        make_hosts(NUM_HOSTS) as hosts,
        make_ray_cluster(hosts, Path(name) / "ray") as cluster,
    ):
        folder = Path(name) / "training"
        killed = _train_and_kill(file, folder, cluster)
        notes = read_notes(folder)
    return judged(notes, killed)


def _train_and_kill(file: Path, folder: Path, cluster: RayCluster) -> int:
    """Return the step after which a worker was killed; 0 if the training ended before."""
    folder.mkdir()
    log = folder / "output.txt"
    with log.open("w") as output:
        driver = cluster.head.popen(
            [sys.executable, file, folder],
            env=cluster.environment,
            stdout=output,
            stderr=STDOUT,
        )

    def victims() -> list[Note]:
        return [n for n in read_notes(folder) if n.rank == 1 and n.step >= _KILLED_AFTER]

    killed = 0
    wait_until(lambda: bool(victims()) or driver.poll() is not None, _START_S)
    if found := victims():
        victim = found[-1]
        killed = victim.step
        os.kill(victim.pid, signal.SIGKILL)
    code = exit_code(driver, _FINISH_S if killed else 0.0)
    said = log.read_text()
    # after a kill, the notes tell more than the driver's exit code
    if code is None or (code and (not killed or "NotImplementedError" in said)):
        raise why_it_failed(said, code)
    return killed


def judged(notes: Sequence[Note], killed: int) -> Passed:
    attempts = attempts_of(notes)
    if not attempts:
        raise Shortcoming("nothing-noted", "note() is called in every step", "it was not called")
    judge_ranks(attempts[0], NUM_HOSTS)
    judge_losses(attempts[0], NUM_STEPS, "wrong-training", "before the worker was killed")
    if not killed:
        found = f"it ended after step {last_step(notes)}, and no rank 1 reached step 12"
        raise Shortcoming("nothing-noted", f"{NUM_STEPS} steps on {NUM_HOSTS} ranks", found)
    if len(attempts) < 2:
        raise Shortcoming(
            "not-restarted",
            "Ray restarts the workers",
            f"no step after the worker was killed in step {killed}",
        )
    again = attempts[-1]
    begin = min(each[0].step for each in again.values())
    if begin == 1:
        raise Shortcoming(
            "from-the-beginning",
            "the workers resume from the newest checkpoint",
            "they began with step 1 again",
        )
    judge_ranks(again, NUM_HOSTS)
    judge_losses(again, NUM_STEPS, "state-lost", "after the worker was killed")
    if last_step(again[0]) != NUM_STEPS:
        found = f"the last is step {last_step(again[0])}"
        raise Shortcoming("not-finished", f"{NUM_STEPS} steps", found)
    done = sum(len(each[0]) for each in attempts if 0 in each)
    return Passed(
        [
            f"{NUM_STEPS} losses on {NUM_HOSTS} workers, each on its own host, as on one"
            " process; equal weights after each step",
            f"rank 1 was killed in step {killed}: Ray restarted both workers, and they"
            f" resumed with step {begin}",
        ],
        [Score("steps done, with those done again", done, NUM_STEPS, "one each", "steps")],
    )

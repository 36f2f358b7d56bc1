"""Small studies on each target that can be started here, each with its driver killed on the way.

`python -m tests.tune.on_targets RESULTS [PLACE …]` writes RESULTS/targets.md; studies that RESULTS
has are not repeated.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from drivetrain.testing.hosts import Host, make_hosts
from drivetrain.testing.ray_cluster import make_ray_cluster
from drivetrain.testing.ssh import start_sshd
from drivetrain.tune import decide
from drivetrain.tune.journal import read_journal
from drivetrain.tune.settings import load_study
from tests.support.slurm import SlurmCluster, make_slurm

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "tests/scripts/tuned.py")
CHOICES = """
parameters:
  optimization.learning_rate: [0.3, 0.03, 0.003, 1e30]
  seed: [1, 2, 3]
"""
RANGES = """
parameters:
  optimization.learning_rate: {low: 1e-3, high: 0.5, log: true}
  optimization.weight_decay: {low: 0.0, high: 0.1}
"""


@dataclass(frozen=True)
class Search:
    """What a study is asked to do."""

    flags: tuple[str, ...]
    space: str = RANGES


PAUSE = "successive halving, pause"
SEARCHES = {
    "random": Search(("--trials=3", "--sampler=random")),
    "TPE": Search(("--trials=10", "--generation=8")),  # the ninth goes by the first eight
    PAUSE: Search(("--trials=3", "--generation=3", "--rungs=4", "--sampler=random"), CHOICES),
    "successive halving, stop": Search(
        ("--trials=4", "--generation=2", "--rungs=4", "--sampler=random", "--promote=stop")
    ),
    "population": Search(("--population=3", "--rungs=4,8", "--sampler=random", "--quantile=0.34")),
}
RANKS = ("--nproc-per-trial=2", "--parallel-trials=2")
ENOUGH_S = 1500.0
Facts = tuple[Any, Any]


@dataclass
class Desk:
    """Where a person types `drivetrain tune`."""

    folder: Path
    flags: tuple[str, ...]
    host: Host | None = None
    env: dict[str, str] | None = None
    cluster: SlurmCluster | None = None
    search: str = PAUSE

    @property
    def study(self) -> Path:
        return self.folder / "studies" / self.search.replace(", ", "-").replace(" ", "-")

    def start(self, output: Path, *more: str) -> subprocess.Popen[str]:
        search, space = SEARCHES[self.search], self.folder / "space.yaml"
        space.write_text(search.space)
        about = [f"--space={space}", f"--study={self.study}", "--seed=5"]
        words = ["tune", SCRIPT, *about, *search.flags, *RANKS]
        command = [sys.executable, "-m", "drivetrain", *words, *self.flags, *more]
        environment = {**(self.env or os.environ), "OMP_NUM_THREADS": "1"}
        with output.open("w") as file:
            said: dict[str, Any] = {"stdout": file, "stderr": subprocess.STDOUT, "cwd": ROOT}
            start: Any = subprocess.Popen if self.host is None else self.host.popen
            driver: subprocess.Popen[str] = start(command, env=environment, **said)
            return driver

    def run(self, *more: str) -> str:
        """To its end; what it said."""
        output = self.folder / "said.txt"
        driver = self.start(output, *more)
        code = driver.wait(ENOUGH_S)
        said = output.read_text()
        assert code == 0, said
        return said


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + ENOUGH_S
    while not is_so():
        assert time.monotonic() < deadline_s, f"never: {what}"
        time.sleep(0.1)


def killed_and_run(desk: Desk) -> str:
    """The driver is killed once a trial is submitted; the next one adopts it."""
    output = desk.folder / "first.txt"
    driver = desk.start(output)
    jobs = desk.study / "trials"
    wait_until(
        lambda: driver.poll() is not None or any(jobs.glob("*/job.json")), "a trial is submitted"
    )
    assert driver.poll() is None, output.read_text()
    driver.send_signal(signal.SIGKILL)  # of a host's command: the process itself, by exec
    driver.wait()
    return desk.run()


@contextmanager
def local(folder: Path) -> Iterator[Desk]:
    yield Desk(folder, ())


@contextmanager
def hosts(folder: Path) -> Iterator[Desk]:
    with ExitStack() as stack:
        *machines, host = stack.enter_context(make_hosts(3))
        ssh = stack.enter_context(start_sshd(machines))
        file = folder / "hosts"
        file.write_text("".join(f"{machine.name} slots=2\n" for machine in machines))
        kept = {n: os.environ[n] for n in ("PYTHONPATH",) if n in os.environ}
        variables = {"OMP_NUM_THREADS": "1", **kept}
        env = [f"--env={name}={value}" for name, value in variables.items()]
        flags = ("--on=hosts", f"--hosts={file}", f"--ssh={ssh}", "--nnodes=1", *env)
        yield Desk(folder, flags, host)


@contextmanager
def slurm(folder: Path) -> Iterator[Desk]:
    """One node, and every trial wants it for itself: the second waits in the queue."""
    with make_slurm(1) as cluster:
        flags = ("--on=slurm", "--partition=main", "--exclusive")
        yield Desk(folder, flags, cluster.login, cluster.environment, cluster)


@contextmanager
def ray(folder: Path) -> Iterator[Desk]:
    with (
        make_hosts(1) as machines,
        tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as short,
        make_ray_cluster(machines, Path(short), cpus_per_host=4, has_job_server=True) as cluster,
    ):
        # four workers import torch at a time: on a busy machine that takes longer than Ray allows
        variables = ("OMP_NUM_THREADS=1", "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S=600")
        env = [f"--env={each}" for each in variables]
        flags = ("--on=ray", f"--address={cluster.job_server}", *env)
        yield Desk(folder, flags, cluster.head, dict(cluster.environment))


PLACES = {
    "local": ("this machine", local),
    "hosts": ("2 machines over ssh, a trial on each", hosts),
    "slurm": ("Slurm, 1 node: the second trial waits in the queue", slurm),
    "ray": ("Ray, 1 node of 4 CPUs, by its Jobs API", ray),
}


def facts_of(study: Path) -> Facts:
    state = read_journal(study)
    ended = state.ended.values()
    return state.asked, sorted((e.trial, e.rung, e.outcome, e.step, e.value) for e in ended)


def winner_of(study: Path) -> tuple[int, float, str]:
    """Its number, its value and its weights, every bit."""
    made = load_study(study)
    best = decide.winner(made.settings, read_journal(study))
    assert best is not None
    assert best.value is not None
    tensors = torch.load(made.run_dir(best.trial) / "checkpoints/weights.pt", weights_only=True)
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(tensors[name].numpy().tobytes())
    return best.trial, best.value, digest.hexdigest()


def measure(desk: Desk) -> dict[str, Any]:
    """A study there, its driver killed once."""
    began_s = time.monotonic()
    said = killed_and_run(desk)
    trial, value, sha256 = winner_of(desk.study)
    asked, ended = facts_of(desk.study)
    return {
        "seconds": time.monotonic() - began_s,
        "adopted": said.count("adopted"),
        "winner": trial,
        "value": value,
        "sha256": sha256,
        "asked": [dict(each.values) for each in asked],
        "ended": ended,
    }


Found = dict[str, dict[str, dict[str, Any]]]
"""By place and search."""


def table(found: Found) -> list[str]:
    """For people; the same result as `local`, or not."""
    lines = [
        "# Every search on every target",
        "",
        "`make tune-targets`: three to ten trials of two ranks (`tests/scripts/tuned.py`), two at"
        " a time; each study's driver is killed once a trial is submitted, and started again. Same:"
        " trials, values, outcomes, promotions and forks are those of this machine, to the last"
        " bit.",
        "",
        "| search | where | adopted | winner | its loss | SHA-256 of its weights | same |",
        "| --- | --- | ---: | ---: | ---: | --- | --- |",
    ]
    keys = ("winner", "value", "sha256", "asked", "ended")
    for search in SEARCHES:
        expected = found.get("local", {}).get(search)
        for place, (title, _) in PLACES.items():
            if (row := found.get(place, {}).get(search)) is None:
                continue
            same = expected is not None and all(row[key] == expected[key] for key in keys)
            shown = f"{row['winner']} | {row['value']!r} | `{row['sha256'][:16]}…`"
            cells = f"{search} | {title} | {row['adopted']} | {shown}"
            lines.append(f"| {cells} | {'yes' if same else '**no**'} |")
    missing = [
        f"{search} on {place} (not run to its end)"
        for search in SEARCHES
        for place in PLACES
        if search not in found.get(place, {})
    ]
    missing.append("Kubernetes (no API server and nodes to be had)")
    return [*lines, "", f"Not in the table: {'; '.join(missing)}.", ""]


def main(folder: Path, places: Sequence[str]) -> None:
    """Measure, keep what was found (targets.json), and write the table."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "targets.json"
    found: Found = json.loads(file.read_text()) if file.exists() else {}
    for place in places or PLACES:
        missing = [search for search in SEARCHES if search not in found.get(place, {})]
        if not missing:
            continue
        with (
            tempfile.TemporaryDirectory(prefix="tune-") as name,
            PLACES[place][1](Path(name)) as desk,
        ):
            for search in missing:
                desk.search = search
                found.setdefault(place, {})[search] = measure(desk)
                file.write_text(json.dumps(found, indent=1) + "\n")
                found = json.loads(file.read_text())
    (folder / "targets.md").write_text("\n".join(table(found)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

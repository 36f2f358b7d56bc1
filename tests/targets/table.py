"""`python -m tests.targets.table docs/targets.md RESULTS [PLACE …]`: the same examples everywhere.

Each example is trained once in one process and then on every target that can be started here; the
losses of all steps are held against each other. Results are kept in a folder, one file a run, so
that places can be run one by one; the page has what is there.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from drivetrain.testing.hosts import make_hosts
from drivetrain.testing.ray_cluster import make_ray_cluster
from drivetrain.testing.ssh import start_sshd
from drivetrain.verify.parity.compare import TOLERANCES
from drivetrain.verify.scalars import step_scalars
from tests.ray import runs as ray_runs
from tests.support.slurm import make_slurm
from tests.targets import test_hosts, test_slurm
from tests.targets.running import DRIVETRAIN, ENVIRONMENT, QUICK, ROOT, STEPS

EXAMPLES = ("digits.py", "gpt.py")
BEGIN, END = "<!-- table -->", "<!-- end of table -->"
Trained = dict[str, Path]
"""Run directories, by example."""


def _local(folder: Path, ranks: int) -> Trained:
    runs = {}
    for example in EXAMPLES:
        run = folder / example
        flags = [f"--run-dir={run}", f"--nproc-per-node={ranks}", "--spares=0"]
        command = [*DRIVETRAIN, "train", *flags, str(ROOT / "examples" / example), *STEPS]
        subprocess.run(command, check=True, env=ENVIRONMENT, capture_output=True, timeout=300)
        runs[example] = run
    return runs


def _over_ssh(folder: Path) -> Trained:
    runs = {}
    with ExitStack() as stack:
        *machines, host = stack.enter_context(make_hosts(3))
        ssh = stack.enter_context(start_sshd(machines))
        for example in EXAMPLES:
            own = folder / example
            own.mkdir()
            desk = test_hosts.Desk(host, machines, ssh, own)
            desk.train("--wait", *QUICK, str(ROOT / "examples" / example), *STEPS)
            runs[example] = desk.run
    return runs


def _slurm(folder: Path) -> Trained:
    runs = {}
    with make_slurm(2, gpus_per_node=2, grace_s=20) as cluster:
        for example in EXAMPLES:
            own = folder / example
            own.mkdir()
            desk = test_slurm.Desk(cluster, own)
            desk.train("--wait", str(ROOT / "examples" / example), *STEPS)
            runs[example] = desk.run
    return runs


def _ray(folder: Path) -> Trained:
    runs = {}
    with (
        make_hosts(2) as hosts,
        tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as short,
        make_ray_cluster(hosts, Path(short)) as cluster,
    ):
        for example in EXAMPLES:
            run, script = folder / example, f"../../examples/{example}"
            ray_runs.finish(ray_runs.start(cluster, run, script, *STEPS, flags=("--nodes=2",)), run)
            runs[example] = run
    return runs


PLACES: dict[str, tuple[str, Callable[[Path], Trained]]] = {
    "local": ("4 processes of one machine", lambda folder: _local(folder, ranks=4)),
    "hosts": ("2 hosts by ssh, 2 processes each", _over_ssh),
    "slurm": ("Slurm, 2 nodes of 2 processes", _slurm),
    "ray": ("Ray, 2 nodes of 1 worker", _ray),
}


def _losses(run: Path) -> dict[int, float]:
    return {step: values["train/loss"] for step, values in step_scalars(run).items()}


def measure(place: str, results: Path) -> None:
    """Train everything there; one file for each example."""
    with tempfile.TemporaryDirectory(prefix="targets-") as folder:
        for name in ("one", place):
            (Path(folder) / name).mkdir()
        reference = _local(Path(folder) / "one", ranks=1)
        trained = PLACES[place][1](Path(folder) / place)
        for example, run in trained.items():
            one, here = _losses(reference[example]), _losses(run)
            if one.keys() != here.keys() or len(one) != 20:
                raise RuntimeError(f"{example} on {place}: steps {sorted(here)}")
            found = {
                "steps": len(here),
                "one": one,
                "here": here,
                "apart": max(abs(here[step] - one[step]) / abs(one[step]) for step in one),
            }
            path = results / f"{Path(example).stem}-{place}.json"
            path.write_text(json.dumps(found, indent=1) + "\n")


def table(results: Path) -> list[str]:
    """What is there, for people."""
    lines = [
        "| where | example | loss at step 1 | at step 20 | in one process | furthest apart |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for place, (title, _) in PLACES.items():
        for example in EXAMPLES:
            path = results / f"{Path(example).stem}-{place}.json"
            if path.is_file():
                lines.append(_row(title, example, json.loads(path.read_text())))
    bound = TOLERANCES["fp32"].loss
    return [*lines, "", f"Furthest apart: relative to the loss; {bound:g} is what parity allows."]


def _row(title: str, example: str, found: dict[str, Any]) -> str:
    here, one = found["here"], found["one"]
    figures = f"{here['1']:.6f} | {here['20']:.6f} | {one['20']:.6f} | {found['apart']:.1e}"
    return f"| {title} | `{example}` | {figures} |"


def main(page: Path, results: Path, *places: str) -> None:
    """Run the places named (none: all; `-`: only write the page)."""
    results.mkdir(parents=True, exist_ok=True)
    for place in places or PLACES:
        if place != "-":
            measure(place, results)
    head, rest = page.read_text().split(BEGIN)
    tail = rest.split(END)[1]
    page.write_text("\n".join([head + BEGIN, "", *table(results), "", END]) + tail)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])

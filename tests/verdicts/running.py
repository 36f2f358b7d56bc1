"""Running the script with a fault in it, on real ranks, and asking for the verdict."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from drivetrain.diagnose.finding import Finding
from drivetrain.diagnose.run import diagnose
from drivetrain.supervise.processes.node import adopt_orphans
from drivetrain.testing.hosts import make_hosts
from drivetrain.verify.drills.template import Template
from tests.verdicts.faults import FAULTS, SCRIPT, Plant

STALL_S = 1.5
PATIENT_S = 20.0
"""Where no stall is meant, a busy machine must not make one."""
_QUOTA_PERIOD_US = 5_000
_LONGER = {"slow_rank_10": 0.14, "slow_rank_20": 0.20, "slow_rank_50": 0.50}
"""What the same work takes longer under a quota. A small one is partly made up for while a rank
waits: with 0.10 its own work was measured to take 7 % longer."""
_DEADLINE_S = 120.0
LINK_MBIT = 400.0
WAITING_WORDS = ("max_steps=30", "global_batch_size=128", "micro_batch_size=64")
"""Where all ranks wait, for a disk or a link."""
COMPUTING_WORDS = ("max_steps=150", "global_batch_size=384", "micro_batch_size=192")
"""Where a rank's own work is judged: more than half of a step is computing, and a run lasts longer
than a shared machine's processors keep one pace (a virtual one may lose a quarter for a second)."""
SLOW_SIZES = {"PLANT_WIDTH": "768", "PLANT_DEPTH": "4"}


class Stage:
    """Where runs are started: this machine, or two hosts with a slow link between them.

    What has imported torch once is kept, and forks each run.
    """

    def __init__(self, folder: Path) -> None:
        adopt_orphans()  # what a template forks becomes this process's child
        self._folder = folder
        self._here = Template(folder)
        _wake(self._here, folder / "template-here")
        self._there: list[Template] = []
        self._hosts = ExitStack()

    def templates(self, plant: Plant) -> list[Template]:
        """One per node of the run."""
        if plant.name != "slow_link":
            return [self._here]
        if not self._there:
            hosts = self._hosts.enter_context(make_hosts(2, rate_mbit=LINK_MBIT))
            self._there = [Template(self._folder, host) for host in hosts]
            for host, template in zip(hosts, self._there, strict=True):
                _wake(template, self._folder / f"template-{host.name}")
        return self._there

    def close(self) -> None:
        """End them."""
        for template in (self._here, *self._there):
            template.close()
        self._hosts.close()


def _wake(template: Template, path: Path) -> None:
    """On a machine that is busy, importing torch may take minutes."""
    try:
        template.wake()
    except RuntimeError:
        deadline_s = time.monotonic() + 600
        while not path.exists() and time.monotonic() < deadline_s:
            time.sleep(0.1)


@dataclass(frozen=True)
class Outcome:
    """How one run ended, and what was said of it."""

    plant: Plant
    run_dir: Path
    findings: list[Finding]
    output: str
    exit_code: int | None
    late_s: float | None
    """Seconds between the stall limit and the verdict; None when it was not a stall."""


def run_planted(plant: Plant, folder: Path, stage: Stage) -> Outcome:
    """One run, to its end."""
    folder.mkdir(parents=True)
    run_dir, told, log = folder / "run", folder / "told", folder / "output.txt"
    is_slow = plant.name == "clean" or FAULTS[plant.name].is_slow
    hangs = plant.name in FAULTS and FAULTS[plant.name].hangs
    with ExitStack() as stack:
        environment = {
            **os.environ,
            "PLANT": plant.variable,
            "PLANT_TOLD": str(told),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(folder),
            **(SLOW_SIZES if is_slow else {}),
            **_group_for(plant, stack),
            **_disk_for(plant, folder, stack),
        }
        words = [
            f"--run-dir={run_dir}",
            *(
                ("--nproc-per-node=1", "--nnodes=2")
                if plant.name == "slow_link"
                else (f"--nproc-per-node={plant.ranks}",)
            ),
            f"--stall-timeout={STALL_S if hangs else PATIENT_S}",
            "--max-restarts=0",
            "--spares=0",
            "--warm-start",
            str(SCRIPT),
            *_sizes(plant, is_slow=is_slow),
        ]
        code = _finish(stage.templates(plant), words, environment, log)
    findings = diagnose(run_dir)
    return Outcome(plant, run_dir, findings, log.read_text(), code, _late_s(run_dir, told))


def _sizes(plant: Plant, *, is_slow: bool) -> tuple[str, ...]:
    if not is_slow:
        return ("max_steps=40", f"global_batch_size={4 * plant.ranks}")
    return WAITING_WORDS if plant.name in ("slow_link", "slow_disk") else COMPUTING_WORDS


def _finish(
    templates: Sequence[Template], words: list[str], environment: dict[str, str], log: Path
) -> int:
    nodes = [template.start(words, environment, log) for template in templates]
    deadline_s = time.monotonic() + _DEADLINE_S
    while None in (codes := [node.poll() for node in nodes]):
        if time.monotonic() > deadline_s:
            for node in nodes:
                node.kill()
            raise TimeoutError(f"not over in time: {log.read_text()}")
        time.sleep(0.02)
    return max(code or 0 for code in codes)


def _late_s(run_dir: Path, told: Path) -> float | None:
    """From the moment the limit was passed to the verdict."""
    try:
        end = json.loads((run_dir / "attempts" / "0001" / "end.json").read_text())
        if end["kind"] != "stalled" or not told.exists():
            return None
        allowed = re.search(r"([\d.]+) s are allowed", end["detail"])
        limit_s = float(allowed[1]) if allowed else STALL_S
        return float(end["time_s"]) - float(told.read_text()) - limit_s
    except (OSError, ValueError):
        return None


def _group_for(plant: Plant, stack: ExitStack) -> dict[str, str]:
    if plant.name == "out_of_memory":
        limit = {"memory.limit_in_bytes": str(200 << 20)}
        return {"PLANT_GROUP": str(stack.enter_context(_control_group("memory", limit)))}
    if plant.name.startswith("slow_rank"):
        share = 1 / (1 + _LONGER[plant.name])
        limit = {
            "cpu.cfs_period_us": str(_QUOTA_PERIOD_US),
            "cpu.cfs_quota_us": str(round(share * _QUOTA_PERIOD_US)),
        }
        return {"PLANT_GROUP": str(stack.enter_context(_control_group("cpu", limit)))}
    return {}


def _disk_for(plant: Plant, folder: Path, stack: ExitStack) -> dict[str, str]:
    if plant.name != "slow_disk":
        return {}
    from tests.verdicts.slow_disk import slow_disk

    return {"PLANT_DISK": str(stack.enter_context(slow_disk(folder / "disk")))}


@contextmanager
def _control_group(controller: str, limits: dict[str, str]) -> Iterator[Path]:
    """A cgroup of its own (version 1); needs root."""
    group = Path("/sys/fs/cgroup") / controller / f"drivetrain-{uuid4().hex[:8]}"
    group.mkdir()
    try:
        for name, value in limits.items():
            (group / name).write_text(value)
        yield group
    finally:
        for _ in range(100):
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.05)

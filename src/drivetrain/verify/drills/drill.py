"""A drill: one run with faults, and an audit against the same run without them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from drivetrain.checkpoint import catalogue, lineage
from drivetrain.checkpoint.lineage import Claim
from drivetrain.checkpoint.manifest import DamagedCheckpoint
from drivetrain.checkpoint.storage import storage_at
from drivetrain.core.errors import DrivetrainError
from drivetrain.supervise.failures.rank_dump import kernel_state
from drivetrain.supervise.processes.node import adopt_orphans
from drivetrain.testing.hosts import Hosts
from drivetrain.verify.drills.faults import FOR_A_PERSON, ON_SMALL_DISK, Fault, Faults
from drivetrain.verify.drills.inject import Injector
from drivetrain.verify.drills.nodes import DrillNode
from drivetrain.verify.drills.template import Template


class NoFinalWeights(DrivetrainError):
    """A run has ended successfully, but left no weights to compare."""


# The audit after a drill: is the run what it would have been without faults?

StepIds = dict[int, list[int]]


def sample_problems(
    folder: Path, run_dir: Path, expected: StepIds, removed: Sequence[lineage.Claim] = ()
) -> list[str]:
    """Problems if a step of the run did not use exactly its expected samples, once.

    A step counts in the last attempt that resumed from before it: steps that an earlier attempt did
    beyond that point were repeated, and are not part of the run. `removed` are claims that an
    operator has deleted in the meantime.
    """
    claims = [*lineage.read_claims(storage_at(run_dir / "checkpoints")), *removed]
    seen = read_samples(folder)
    problems = []
    for step, ids in expected.items():
        owner = max((c.attempt for c in claims if c.step < step), default=0)
        used = sorted(seen.get((owner, step), []))
        if used != ids:
            problems.append(f"step {step} of attempt {owner} used {used} instead of {ids}")
    return problems[:3]


def read_samples(folder: Path) -> dict[tuple[int, int], list[int]]:
    """(attempt, step) → sample ids over all ranks, as the witnesses recorded them."""
    seen: dict[tuple[int, int], list[int]] = defaultdict(list)
    for path in (folder / "samples").glob("*.jsonl"):
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            seen[entry["attempt"], entry["step"]] += entry["ids"]
    return seen


def checkpoint_problems(run_dir: Path) -> list[str]:
    """Problems if the newest checkpoint is not intact, checked byte for byte."""
    storage = storage_at(run_dir / "checkpoints")
    good = [entry for entry in catalogue.entries(storage) if entry.manifest is not None]
    if not good:
        return ["there is no good checkpoint"]
    try:
        catalogue.verify(storage, good[0].folder)
    except DamagedCheckpoint as error:
        return [f"{good[0].folder}: {error}"]
    return []


def descendants() -> set[int]:
    """Every living process below this one, which has adopted orphans."""
    parents: dict[int, list[int]] = defaultdict(list)
    for entry in filter(str.isdigit, os.listdir("/proc")):
        found = kernel_state(int(entry))
        if found is not None and found[0] != "Z":
            parents[found[1]].append(int(entry))
    below, queue = set(), [os.getpid()]
    while queue:
        children = parents[queue.pop()]
        below |= set(children)
        queue += children
    return below


def orphans(expected: set[int], patience_s: float = 2.0) -> list[str]:
    """Problems for processes of the drill that are still running."""
    deadline_s = time.monotonic() + patience_s
    while (left := descendants() - expected) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return [f"process {pid} is still running" for pid in sorted(left)]


def weights_fingerprint(run_dir: Path) -> str:
    """A digest of every bit of the trained weights; NoFinalWeights if the run has left none."""
    from drivetrain.train.saving.weights import read_weights, weights_sha256
    from drivetrain.train.weights.safetensors import NotReadable

    try:
        return weights_sha256(read_weights(run_dir / "checkpoints"))
    except NotReadable as error:
        raise NoFinalWeights(
            f"the run wrote no final weights to compare ({error}); let its loop run to its end: a "
            "loop left by break or return writes none"
        ) from error


_DISK_MB = 24
_PATIENCE = ("--stall-timeout", "2.5", "--grace-period", "10")
_MEET_QUICKLY = (
    "--rdzv-conf",
    "keep_alive_interval=1,keep_alive_max_attempt=4,last_call_timeout=1,join_timeout=60",
)


@dataclass(frozen=True)
class Setting:
    """How a drill's run is started."""

    argv: tuple[str, ...]
    """The script and its arguments."""
    ranks: int = 2
    """Per node."""
    elastic: bool = False
    """Whether the run may continue with fewer nodes."""
    flags: tuple[str, ...] = ()
    """More flags for `drivetrain train`."""
    disk: Path | None = None
    """A small disk for checkpoints, for faults that fill it."""
    templates: tuple[Template, ...] = ()
    """Per node, the template its processes are forked from; empty: started on this machine."""
    forced: tuple[str, ...] = ()
    """Settings that are added to the script's, as key=value; those that do not fit give way."""


@dataclass(frozen=True)
class Reference:
    """The result of the run without faults."""

    weights: str
    samples: StepIds
    took_s: float


@dataclass
class DrillOutcome:
    """The result of a drill."""

    faults: Sequence[Fault]
    problems: list[str] = field(default_factory=list)
    recovery_s: list[float] = field(default_factory=list)
    """From each fault to the next committed checkpoint."""
    took_s: float = 0.0
    attempts: int = 0
    device: str = ""
    """Device that the ranks trained on."""

    @property
    def passed(self) -> bool:
        """Whether the run ended as if nothing had happened."""
        return not self.problems


def run_once(
    setting: Setting, faults: Faults, folder: Path, timeout_s: float = 3600
) -> DrillOutcome:
    """Run once on this machine, without comparing the result."""
    return _run(setting, faults, folder, None, timeout_s)[0]


def run_reference(
    setting: Setting, folder: Path, hosts: Hosts | None = None, timeout_s: float = 120
) -> Reference:
    """Run without faults in the same setting."""
    outcome, run_dir, _ = _run(setting, Faults(), folder, hosts, timeout_s)
    if outcome.problems:
        raise DrivetrainError(f"the run fails without any fault: {'; '.join(outcome.problems)}")
    samples = {step: sorted(ids) for (_, step), ids in read_samples(folder).items()}
    return Reference(weights_fingerprint(run_dir), samples, outcome.took_s)


def run_drill(
    setting: Setting,
    faults: Faults,
    reference: Reference,
    folder: Path,
    hosts: Hosts | None = None,
    timeout_s: float = 120.0,
) -> DrillOutcome:
    """Run with faults, and compare with the reference."""
    outcome, run_dir, removed = _run(setting, faults, folder, hosts, timeout_s)
    if not outcome.problems:
        if weights_fingerprint(run_dir) != reference.weights:
            outcome.problems.append("the weights are not those of the uninterrupted run")
        outcome.problems += sample_problems(folder, run_dir, reference.samples, removed)
        outcome.problems += checkpoint_problems(run_dir)
    return outcome


def _run(
    setting: Setting, faults: Faults, folder: Path, hosts: Hosts | None, timeout_s: float
) -> tuple[DrillOutcome, Path, list[Claim]]:
    run_dir = folder / "run"
    outcome = DrillOutcome(faults.faults)
    nodes = _make_nodes(setting, folder, run_dir, hosts)
    injector = Injector(nodes, hosts, run_dir)
    adopt_orphans()
    for template in setting.templates:
        template.wake()
    before = descendants()
    began_s = time.monotonic()
    if any(fault.kind in ON_SMALL_DISK for fault in faults.faults):
        _put_checkpoints_on(setting.disk, run_dir)
    for fault in faults.faults:
        nodes[fault.host].skew_s += fault.skew_s
    until_s = began_s + timeout_s
    try:
        for node in nodes:
            node.start()
        person = next((fault for fault in faults.faults if fault.kind in FOR_A_PERSON), None)
        expected = 0 if person is None else FOR_A_PERSON[person.kind]
        _watch(nodes, injector, list(faults.faults), outcome, until_s, expected)
        if person is not None:
            _call_a_person(nodes, injector, person, outcome, until_s)
    finally:
        injector.close()
        for node in nodes:
            node.close()
    outcome.problems += orphans(before | {t.pid for t in setting.templates})
    outcome.took_s = time.monotonic() - began_s
    outcome.attempts = len(list((run_dir / "checkpoints").glob("attempt-*.json")))
    for start in run_dir.glob("attempts/*/start.json"):
        outcome.device = str(json.loads(start.read_text()).get("device_name", ""))
    return outcome, run_dir, injector.removed


def _call_a_person(
    nodes: list[DrillNode],
    injector: Injector,
    fault: Fault,
    outcome: DrillOutcome,
    deadline_s: float,
) -> None:
    """Check that nothing was lost when the run ended, fix the fault, and resume."""
    outcome.problems += injector.loss_problems()
    injector.put_right(fault)
    if outcome.problems:
        return
    put_right = Recovery(time.time(), injector.num_claims())
    for node in nodes:
        node.start()
    _watch(nodes, injector, [], outcome, deadline_s, recoveries=[put_right])


def _put_checkpoints_on(disk: Path | None, run_dir: Path) -> None:
    if disk is None:
        raise RuntimeError("this fault needs a small disk: see small_disk()")
    shutil.rmtree(disk / "checkpoints", ignore_errors=True)  # left by an earlier drill
    (disk / "checkpoints").mkdir()
    run_dir.mkdir(parents=True)
    (run_dir / "checkpoints").symlink_to(disk / "checkpoints")


def _watch(
    nodes: list[DrillNode],
    injector: Injector,
    waiting: list[Fault],
    outcome: DrillOutcome,
    deadline_s: float,
    expected: int = 0,
    recoveries: Sequence[Recovery] = (),
) -> None:
    """Inject faults when due, until every node has ended; all must end with the `expected` code."""
    recoveries = list(recoveries)
    while True:
        running = [node for node in nodes if not node.poll()]
        if not running:
            break
        time.sleep(0.004)
        if time.monotonic() > deadline_s:
            outcome.problems.append(f"not finished in time; {_tails(nodes)}")
            return
        for recovery in recoveries:
            recovery.observe(injector)
        if waiting and injector.is_time(waiting[0]):
            injector.inject(waiting.pop(0))
            recoveries.append(Recovery(time.time(), injector.num_claims()))
    for recovery in recoveries:
        recovery.observe(injector)
    outcome.recovery_s = [s for s in (recovery.took_s for recovery in recoveries) if s is not None]
    codes = [node.exit_code for node in nodes]
    if any(code != expected for code in codes):
        outcome.problems.append(f"exit codes {codes}; {_tails(nodes)}")
    if waiting:
        outcome.problems.append(f"the run ended before {waiting[0]}")


@dataclass
class Recovery:
    """From a fault to the next checkpoint; a later attempt's, if the fault ended the old one."""

    broken_s: float
    attempt: int
    """The one that the fault hit."""
    by_any_s: float | None = None
    by_later_s: float | None = None

    def observe(self, injector: Injector) -> None:
        """Update the times from the checkpoints committed so far."""
        if self.by_later_s is not None:
            return
        for attempt, at_s in injector.commits():
            if at_s > self.broken_s:
                self.by_any_s = min(at_s, self.by_any_s or at_s)
                if attempt > self.attempt:
                    self.by_later_s = min(at_s, self.by_later_s or at_s)

    @property
    def took_s(self) -> float | None:
        """None if nothing more was committed: the fault came after the last step."""
        at_s = self.by_later_s or self.by_any_s
        return None if at_s is None else at_s - self.broken_s


def _tails(nodes: Sequence[DrillNode]) -> str:
    return " | ".join(node.output()[-600:] for node in nodes)


def _make_nodes(
    setting: Setting, folder: Path, run_dir: Path, hosts: Hosts | None
) -> list[DrillNode]:
    num_nodes = 1 if hosts is None else len(hosts)
    fewest = 1 if setting.elastic else num_nodes
    several = [] if hosts is None else [f"--nnodes={fewest}:{num_nodes}", *_MEET_QUICKLY]
    command = [
        f"--run-dir={run_dir}",
        f"--nproc-per-node={setting.ranks}",
        "--warm-start",
        *_PATIENCE,
        *several,
        *setting.flags,
        *setting.argv,
        *setting.forced,
    ]
    return [
        DrillNode(
            index,
            command,
            folder,
            setting.ranks,
            None if hosts is None else hosts[index],
            setting.templates[index] if setting.templates else None,
            forced=setting.forced,
        )
        for index in range(num_nodes)
    ]


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """Mount a small disk that can be filled without harm to anything else; needs root."""
    folder.mkdir(parents=True)
    options = f"size={_DISK_MB}m"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)  # noqa: S607
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)  # noqa: S607

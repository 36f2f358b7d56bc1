"""Injects faults from outside the run, into real processes: one small function per kind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

from drivetrain.checkpoint import catalogue, lineage
from drivetrain.checkpoint.lineage import Claim
from drivetrain.checkpoint.manifest import NAME, DamagedCheckpoint
from drivetrain.checkpoint.storage import storage_at
from drivetrain.record.session import RankProgress
from drivetrain.testing.hosts import Hosts
from drivetrain.verify.drills.faults import FOR_A_PERSON, Fault
from drivetrain.verify.drills.nodes import DrillNode

_FILLER = "filler"


class Injector:
    """Sees the run from outside: its nodes, its ranks' progress pages, its directory."""

    def __init__(self, nodes: list[DrillNode], hosts: Hosts | None, run_dir: Path) -> None:
        self._nodes = nodes
        self._hosts = hosts
        self._run_dir = run_dir
        self._passing: list[threading.Thread] = []
        self._claims = 0
        self._had: list[str] = []
        self.removed: list[Claim] = []
        """Claims that an operator has deleted; their attempts still took place."""

    def pages(self) -> list[RankProgress]:
        """Every living rank's page, node by node."""
        return [page for node in self._nodes for page in node.pages()]

    def is_time(self, fault: Fault) -> bool:
        """Whether the fault is due."""
        pages = self.pages()
        if fault.point == "recovery":
            return bool(pages) and self.num_claims() > self._claims
        if not pages or max(page.step for page in pages) < fault.step:
            return False
        if fault.kind in ("corrupt_shard", *FOR_A_PERSON):
            return len(self._manifests()) > 1  # with only one there is nothing to fall back to
        return fault.point == "step" or self._is_saving()

    def inject(self, fault: Fault) -> None:
        time.sleep(fault.delay_s)
        self._claims = self.num_claims()
        self._had = sorted(path.parent.name for path in self._manifests())
        acts: dict[str, Callable[[Fault], None]] = {
            "kill": lambda f: self._signal(f, signal.SIGKILL),
            "stop": lambda f: self._signal(f, signal.SIGSTOP),
            "hang": self._hang,
            "slow": lambda f: self._for_a_while(self._slow, f),
            "partition": lambda f: self._for_a_while(self._partition, f),
            "fill_disk": lambda f: self._for_a_while(self._fill_disk, f),
            "corrupt_shard": self._corrupt,
            "kill_supervisor": self._kill_supervisor,
            "kill_node": lambda f: self._nodes[f.host].crash(),
            "preempt": self._preempt,
            "skew": self._kill_supervisor,
            "full_at_end": self._fill_for_good,
            "spoil_claim": self._spoil_claim,
            "read_only": lambda f: self._remount("ro"),  # noqa: ARG005
        }
        acts[fault.kind](fault)

    def loss_problems(self) -> list[str]:
        """Problems if one of the two newest checkpoints from before the fault is not intact."""
        storage = storage_at(self._run_dir / "checkpoints")
        problems = []
        for folder in self._had[-2:]:
            try:
                catalogue.verify(storage, folder)
            except DamagedCheckpoint as error:
                problems.append(f"{folder} was lost: {error}")
        return problems

    def put_right(self, fault: Fault) -> None:
        """Fix the fault as an operator would, after reading the run's message."""
        if fault.kind == "full_at_end":
            (self._run_dir / "checkpoints" / _FILLER).unlink()
        elif fault.kind == "read_only":
            self._remount("rw")
        elif fault.kind == "spoil_claim":
            self._newest_claim().unlink()

    def close(self) -> None:
        """Wait until temporary faults are over."""
        for thread in self._passing:
            thread.join()

    def commits(self) -> list[tuple[int, float]]:
        """(attempt, time) of each current checkpoint."""
        return [
            (int(path.parent.name.rpartition("-a")[2]), _mtime(path)) for path in self._manifests()
        ]

    def num_claims(self) -> int:
        """Number of attempts so far."""
        return len(list((self._run_dir / "checkpoints").glob("attempt-*.json")))

    def _manifests(self) -> list[Path]:
        return list((self._run_dir / "checkpoints").glob(f"step-*/{NAME}"))

    def _is_saving(self) -> bool:
        folders = (self._run_dir / "checkpoints").glob("step-*")
        return any(not (folder / NAME).exists() for folder in folders)

    def _newest_data(self) -> Path | None:
        newest = max(self._manifests(), default=None, key=lambda path: path.parent.name)
        return None if newest is None else newest.parent / "data-00000.bin"

    def _victim(self, fault: Fault) -> int | None:
        pages = self.pages()
        return pages[fault.rank % len(pages)].pid if pages else None

    def _signal(self, fault: Fault, number: signal.Signals) -> None:
        pid = self._victim(fault)
        if pid is not None:
            os.kill(pid, number)

    def _hang(self, fault: Fault) -> None:
        pid = self._victim(fault)
        if pid is not None:
            (self._nodes[0].folder / f"hang-{pid}").touch()

    def _slow(self, fault: Fault) -> None:
        pid = self._victim(fault)
        end_s = time.monotonic() + fault.duration_s
        while pid is not None and time.monotonic() < end_s:
            try:
                os.kill(pid, signal.SIGSTOP)
                time.sleep(0.08)
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                return
            time.sleep(0.02)

    def _partition(self, fault: Fault) -> None:
        if self._hosts is not None:
            a, b = self._hosts[0], self._hosts[1]
            self._hosts.cut(a, b)
            time.sleep(fault.duration_s)
            self._hosts.heal(a, b)

    def _fill_disk(self, fault: Fault) -> None:
        self._fill_for_good(fault)
        time.sleep(fault.duration_s)
        (self._run_dir / "checkpoints" / _FILLER).unlink()

    def _fill_for_good(self, fault: Fault) -> None:  # noqa: ARG002
        """Fill the small disk that holds the checkpoints; see `small_disk`."""
        with (
            open(self._run_dir / "checkpoints" / _FILLER, "wb", buffering=0) as file,
            contextlib.suppress(OSError),
        ):
            while True:
                file.write(b"\0" * (1 << 16))

    def _remount(self, mode: str) -> None:
        """Remount the small disk; retry while a save has a file open on it."""
        disk = (self._run_dir / "checkpoints").resolve().parent
        argv = ["mount", "-o", f"remount,{mode}", str(disk)]
        while subprocess.run(argv, capture_output=True, check=False).returncode:
            time.sleep(0.005)

    def _newest_claim(self) -> Path:
        return max((self._run_dir / "checkpoints").glob("attempt-*.json"))

    def _spoil_claim(self, fault: Fault) -> None:
        self.removed = lineage.read_claims(storage_at(self._run_dir / "checkpoints"))[-1:]
        os.truncate(self._newest_claim(), 0)
        self._signal(fault, signal.SIGKILL)

    def _corrupt(self, fault: Fault) -> None:
        data = self._newest_data()
        if data is not None and data.exists():
            with open(data, "r+b") as file:
                file.seek(data.stat().st_size // 2)
                byte = file.read(1)
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte[0] ^ 0x10]))
        self._signal(fault, signal.SIGKILL)

    def _kill_supervisor(self, fault: Fault) -> None:
        pid = self._nodes[fault.host].supervisor()
        if pid is not None:
            os.kill(pid, signal.SIGKILL)

    def _preempt(self, fault: Fault) -> None:
        process = self._nodes[fault.host].process
        if process is not None:
            process.send_signal(signal.SIGTERM)

    def _for_a_while(self, act: Callable[[Fault], None], fault: Fault) -> None:
        thread = threading.Thread(target=act, args=(fault,))
        thread.start()
        self._passing.append(thread)


def _mtime(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0

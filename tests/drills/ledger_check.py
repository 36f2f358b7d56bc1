"""Do the ledger's classes add up to the wall clock? Real runs of every kind, timed from outside.

Each run is a `drivetrain train` like a user's. A clock that knows nothing of the run is read just
before its first command is started and just after its last has ended; the ledger is made from the
run's directory alone.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from drivetrain.record.ledger import CLASSES, ledger_of
from drivetrain.record.reading import open_run
from drivetrain.record.session import read_progress

KINDS = ("clean", "killed", "preempted", "stalled", "resized")
_WORDS = ("-m", "drivetrain.verify.drills.workload", "checkpoint.every_steps=20")
_FLAGS = ("--nproc-per-node=2", "--stall-timeout=2.5", "--grace-period=10")
_MEET_QUICKLY = "keep_alive_interval=1,keep_alive_max_attempt=4,last_call_timeout=1,join_timeout=60"
_PATIENCE_S = 240.0
_RESUME_ME = 75


@dataclass(frozen=True)
class Row:
    """One run, and how far the ledger was from the clock."""

    number: int
    kind: str
    outside_s: float
    """From before the first command to after the last."""
    ledger_s: float
    """What the classes add up to."""
    attempts: int
    seconds: dict[str, float]

    @property
    def deviation(self) -> float:
        """As a part of the wall clock; negative when the ledger has too little."""
        return (self.ledger_s - self.outside_s) / self.outside_s


class Command:
    """One `drivetrain train`, and its ranks' progress pages."""

    def __init__(self, run_dir: Path, folder: Path, flags: tuple[str, ...], max_steps: int) -> None:
        self._folder = folder
        folder.mkdir(parents=True)
        words = (*_FLAGS, f"--run-dir={run_dir}", *flags, *_WORDS, f"max_steps={max_steps}")
        log = (folder / "output.txt").open("w")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "drivetrain", "train", *words],
            env={**os.environ, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=log,
        )
        log.close()

    def wait_for(self, step: int) -> int:
        """Until so many steps are done; the process id of a rank that has done them."""
        deadline_s = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline_s and self.process.poll() is None:
            for session in self._folder.glob("drivetrain-*"):
                page = read_progress(session, 1)
                if page is not None and page.step >= step:
                    return page.pid
            time.sleep(0.02)
        raise RuntimeError(f"step {step} did not come:\n{self.output()}")

    def end(self, expected: int = 0) -> None:
        """Wait for it."""
        # wait() with a time-out looks only every 50 ms, which is as much as is to be measured
        last_resort = threading.Timer(_PATIENCE_S, self.process.kill)
        last_resort.start()
        code = self.process.wait()
        last_resort.cancel()
        if code != expected:
            raise RuntimeError(f"exit code {code} instead of {expected}:\n{self.output()}")

    def output(self) -> str:
        """Everything it printed."""
        return (self._folder / "output.txt").read_text()


def check(number: int, folder: Path, max_steps: int = 400) -> Row:
    """Run number n of the campaign: its kind and the moment of the fault follow from n."""
    kind = KINDS[number % len(KINDS)]
    step = random.Random(number).randint(max_steps // 4, max_steps // 2)  # noqa: S311 - a drill
    run_dir = folder / "run"
    began_s = time.time()
    _ACTS[kind](run_dir, folder, step, max_steps)
    outside_s = time.time() - began_s
    run = open_run(run_dir)
    ledger = ledger_of(run)
    seconds = ledger.seconds
    total_s = sum(seconds.values())
    return Row(number, kind, outside_s, total_s, len(run.attempts()), seconds)


def _clean(run_dir: Path, folder: Path, step: int, max_steps: int) -> None:
    Command(run_dir, folder / "a", (), max_steps).end()


def _killed(run_dir: Path, folder: Path, step: int, max_steps: int) -> None:
    command = Command(run_dir, folder / "a", (), max_steps)
    os.kill(command.wait_for(step), signal.SIGKILL)
    command.end()


def _preempted(run_dir: Path, folder: Path, step: int, max_steps: int) -> None:
    command = Command(run_dir, folder / "a", (), max_steps)
    command.wait_for(step)
    command.process.send_signal(signal.SIGTERM)
    command.end(_RESUME_ME)
    time.sleep(3.0)
    Command(run_dir, folder / "b", (), max_steps).end()


def _stalled(run_dir: Path, folder: Path, step: int, max_steps: int) -> None:
    command = Command(run_dir, folder / "a", (), max_steps)
    os.kill(command.wait_for(step), signal.SIGSTOP)
    command.end()


def _resized(run_dir: Path, folder: Path, step: int, max_steps: int) -> None:
    """A second node comes along, on the same machine."""
    elastic = ("--nnodes=1:2", "--rdzv-conf", _MEET_QUICKLY)
    first = Command(run_dir, folder / "a", elastic, max_steps)
    first.wait_for(step // 2)
    second = Command(run_dir, folder / "b", elastic, max_steps)
    first.end()
    second.end()


_ACTS: dict[str, Callable[[Path, Path, int, int], None]] = {
    "clean": _clean,
    "killed": _killed,
    "preempted": _preempted,
    "stalled": _stalled,
    "resized": _resized,
}


def table_of(rows: list[Row]) -> str:
    """Markdown, a line for each run and one for the worst."""
    used = [name for name in CLASSES if any(row.seconds[name] > 0.005 for row in rows)]
    titles = ["run", "kind", "attempts", "clock", "ledger", "deviation", *used]
    lines = [" | ".join(titles), " | ".join("---" for _ in titles)]
    for row in rows:
        parts = [f"{row.seconds[name]:.2f}" for name in used]
        figures = [f"{row.outside_s:.2f} s", f"{row.ledger_s:.2f} s", f"{row.deviation:+.2%}"]
        cells = [str(row.number), row.kind, str(row.attempts), *figures, *parts]
        lines.append(" | ".join(cells))
    worst = max(rows, key=lambda row: abs(row.deviation))
    said = f"\n{len(rows)} runs; the largest deviation is {worst.deviation:+.2%} ({worst.kind})."
    return "\n".join(f"| {line} |" for line in lines) + f"\n{said}\n"


def _read_rows(path: Path) -> list[Row]:
    if not path.exists():
        return []
    documents = json.loads(path.read_text())
    return [Row(**{k: v for k, v in each.items() if k != "deviation"}) for each in documents]


def main() -> None:
    """`python -m tests.drills.ledger_check OUTPUT [NUM_RUNS]`; goes on."""
    output = Path(sys.argv[1])
    num_runs = int(sys.argv[2]) if len(sys.argv) > 2 else 20
    output.mkdir(parents=True, exist_ok=True)
    rows = _read_rows(output / "rows.json")
    for number in range(len(rows), num_runs):
        with tempfile.TemporaryDirectory(prefix="drivetrain-ledger-") as folder:
            rows.append(check(number, Path(folder)))
        sys.stdout.write(f"{number} {rows[-1].kind}: {rows[-1].deviation:+.2%}\n")
        sys.stdout.flush()
        document = [asdict(row) | {"deviation": row.deviation} for row in rows]
        (output / "rows.json").write_text(json.dumps(document, indent=1) + "\n")
        (output / "table.md").write_text(table_of(rows))
    sys.stdout.write(table_of(rows))


if __name__ == "__main__":
    main()

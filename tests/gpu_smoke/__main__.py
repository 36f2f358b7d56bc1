from __future__ import annotations

import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import torch

import drivetrain
from drivetrain.parallel.accelerator import accelerator_type, num_devices
from tests.gpu_smoke.catalogue import CHECKS
from tests.gpu_smoke.report import exit_code, report
from tests.gpu_smoke.rows import Result
from tests.gpu_smoke.runner import run_check

NO_DEVICE = 2


def main(target: Path, *only: str) -> int:
    count = num_devices()
    if count == 0:
        print(
            f"gpu-smoke: torch {torch.__version__} finds no accelerator here. Install a build of "
            "torch for your devices and look at its driver (docs/gpu.md).",
            file=sys.stderr,
        )
        return NO_DEVICE
    folder = target.parent / "gpu-smoke"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "references.json").unlink(missing_ok=True)
    began_s, results = time.monotonic(), list[Result]()
    for check in CHECKS:
        if only and check.name not in only:
            continue
        result = run_check(check, count, time.monotonic() - began_s, folder)
        print(f"{result.state:8} {result.seconds:4.0f} s  {result.title}", flush=True)
        results.append(result)
        target.write_text(report(_heading(count, began_s), results))  # kept, should it be ended
    print("\n" + target.read_text())
    return exit_code(results)


def _heading(count: int, began_s: float) -> dict[str, str]:
    return {
        "devices": f"{count} ({accelerator_type()})",
        "torch": torch.__version__,
        "drivetrain": f"{drivetrain.__version__} {_commit()}",
        "at": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "in all": f"{time.monotonic() - began_s:.0f} s",
    }


def _commit() -> str:
    words = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return f"({done.stdout.strip() or 'no git'})"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))

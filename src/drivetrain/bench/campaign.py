"""Running a benchmark: its worker on real ranks, then raw samples, table and plot in one folder."""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from drivetrain.bench.report import report
from drivetrain.bench.statistics import paired_difference
from drivetrain.core.errors import WorkerFailure
from drivetrain.core.extras import require
from drivetrain.launch.local import launch


def run_overhead(output: Path, num_rounds: int, num_ranks: int) -> str:
    """A step under Drivetrain, bare torch, Accelerate and Lightning Fabric."""
    for module in ("accelerate", "lightning"):
        require(module, extra="bench")
    output.mkdir(parents=True, exist_ok=True)
    alone = _measure("overhead_worker", output, num_rounds, 1)
    together = _measure("overhead_worker", output, num_rounds, num_ranks)
    return _keep(output, {**alone, **together}, "bare", _machine(num_ranks, num_rounds))


def run_bitwise(output: Path, num_rounds: int, num_ranks: int) -> str:
    """What `reproducibility: bitwise` costs."""
    output.mkdir(parents=True, exist_ok=True)
    samples = _measure("bitwise_worker", output, num_rounds, num_ranks)
    return _keep(output, samples, "standard", _machine(num_ranks, num_rounds))


def run_save(output: Path, num_rounds: int, num_ranks: int) -> str:
    """What an asynchronous save costs, next to none and to bare DCP."""
    output.mkdir(parents=True, exist_ok=True)
    alone = _measure("save_worker", output, num_rounds, 1)
    together = _measure("save_worker", output, num_rounds, num_ranks)
    table = _keep(output, {**alone, **together}, "bare DCP", _machine(num_ranks, num_rounds))
    blocked = "\n".join(_blocked(output, ranks) for ranks in (1, num_ranks))
    (output / "table.md").write_text(f"{table}\n{blocked}\n")
    return f"{table}\n{blocked}\n"


def run_sentinel(output: Path, num_rounds: int, num_ranks: int) -> str:
    """What one comparison of the copies costs, and what that is per step at the default."""
    output.mkdir(parents=True, exist_ok=True)
    samples = _measure("sentinel_worker", output, num_rounds, num_ranks)
    table = _keep(output, samples, "off", _machine(num_ranks, num_rounds))
    shares = "\n".join(_share(training, by_arm) for training, by_arm in samples.items())
    (output / "table.md").write_text(f"{table}\n{shares}\n")
    return f"{table}\n{shares}\n"


def _share(training: str, by_arm: dict[str, list[float]]) -> str:
    """A comparison every hundred steps, as a part of a step."""
    check = paired_difference(by_arm["every step"], by_arm["off"])
    step_s = median(by_arm["off"])
    most = max(check.high, 0.0) / 100 / step_s
    return (
        f"{training}: one comparison costs {check.value * 1e3:.2f} ms (95% interval "
        f"{check.low * 1e3:.2f} to {check.high * 1e3:.2f}); every 100 steps of "
        f"{step_s * 1e3:.0f} ms that is at most {most:.3%} of a step."
    )


def _blocked(output: Path, num_ranks: int) -> str:
    """How long the step that began a save waited for it."""
    samples = json.loads((output / f"blocked-{num_ranks}.json").read_text())
    shown = ", ".join(f"{name} {median(v) * 1e3:.1f} ms" for name, v in samples.items())
    return f"A save kept its step waiting, {num_ranks} rank(s), median: {shown}."


def _measure(worker: str, output: Path, num_rounds: int, num_ranks: int) -> dict[str, Any]:
    require("matplotlib", extra="bench")
    raw = output / "samples.json"
    words = ["--nproc-per-node", str(num_ranks), "-m", f"drivetrain.bench.{worker}"]
    if launch([*words, str(raw.resolve()), str(num_rounds)]) != 0:
        raise WorkerFailure("the measurement failed; its error stands above")
    samples: dict[str, Any] = json.loads(raw.read_text())
    return samples


def _keep(output: Path, samples: dict[str, Any], baseline: str, machine: dict[str, Any]) -> str:
    document = {"machine": machine, "baseline": baseline, "seconds_per_step": samples}
    (output / "samples.json").write_text(json.dumps(document, indent=1) + "\n")
    return report(output)


def _machine(num_ranks: int, num_rounds: int) -> dict[str, Any]:
    packages = ("torch", "accelerate", "lightning")
    return {
        "ranks": num_ranks,
        "rounds": num_rounds,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "device": "cpu (not run on a GPU)",
        **{name: version(name) for name in packages},
    }

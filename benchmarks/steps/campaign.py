"""Running a benchmark: its worker on real ranks, then raw samples, table and plot in one folder."""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report import report
from benchmarks.steps.device import own_accelerator
from drivetrain.core.errors import WorkerFailure
from drivetrain.core.requirements import require
from drivetrain.core.statistics import bootstrap, paired_ratio
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
    return _on_ranks("bitwise_worker", "standard", output, num_rounds, num_ranks)


def run_save(output: Path, num_rounds: int, num_ranks: int) -> str:
    """What an asynchronous save costs, next to none and to bare DCP."""
    output.mkdir(parents=True, exist_ok=True)
    alone = _measure("save_worker", output, num_rounds, 1)
    together = _measure("save_worker", output, num_rounds, num_ranks)
    table = _keep(output, {**alone, **together}, "bare DCP", _machine(num_ranks, num_rounds))
    blocked = "\n".join(_blocked(output, ranks) for ranks in (1, num_ranks))
    (output / "table.md").write_text(f"{table}\n{blocked}\n")
    return f"{table}\n{blocked}\n"


def run_axes(output: Path, num_rounds: int, num_ranks: int) -> str:
    """fsdp, tensor parallelism and a pipeline, next to the same written on bare torch."""
    return _on_ranks("axes_worker", "bare", output, num_rounds, num_ranks)


def run_sentinel(output: Path, num_rounds: int, num_ranks: int) -> str:
    """What one comparison of the copies costs, and what that is per step at the default."""
    table = _on_ranks("sentinel_worker", "off", output, num_rounds, num_ranks)
    share = _share(json.loads((output / "checks.json").read_text()))
    (output / "table.md").write_text(f"{table}\n{share}\n")
    return f"{table}\n{share}\n"


def run_replay(output: Path, num_rounds: int, num_ranks: int) -> str:
    """What it costs to compute a step of one micro-batch twice, every hundred steps."""
    table = _on_ranks("replay_worker", "plain", output, num_rounds, num_ranks)
    arms = json.loads((output / "samples.json").read_text())["seconds_per_step"]["ddp, transformer"]
    ratio = paired_ratio(arms["checked"], arms["plain"])
    value, low, high = ((each - 1) / 100 for each in (ratio.value, ratio.low, ratio.high))
    said = f"A check every 100 steps: {value:.2%} of a step (95% interval {low:.2%} to {high:.2%})."
    (output / "table.md").write_text(f"{table}\n{said}\n")
    return f"{table}\n{said}\n"


def run_stream(output: Path, num_rounds: int, num_ranks: int) -> str:
    """What it costs that ranks compare what they have read of a stream."""
    return _on_ranks("stream_worker", "not", output, num_rounds, num_ranks)


def run_recording(output: Path, num_rounds: int, num_ranks: int) -> str:
    """What the recorder costs a step, by itself and with every sink; and what one event costs."""
    table = _on_ranks("recording_worker", "off", output, num_rounds, num_ranks)
    events = json.loads((output / "events.json").read_text())
    each = bootstrap(events["seconds_per_event"])
    said = (
        f"Sinks: {', '.join(events['sinks'])}. Handing over one step's times: "
        f"{each.value * 1e6:.2f} µs (95% interval {each.low * 1e6:.2f} to {each.high * 1e6:.2f})."
        "\n\nProcessor time of the threads beside the one that trains, per step: "
    )
    beside = {name: bootstrap(v) for name, v in events["seconds_beside_per_step"].items()}
    said += "; ".join(
        f"{name} {b.value * 1e6:.0f} µs ({b.low * 1e6:.0f} to {b.high * 1e6:.0f})"
        for name, b in beside.items()
    )
    (output / "table.md").write_text(f"{table}\n{said}\n")
    return f"{table}\n{said}\n"


def _on_ranks(worker: str, baseline: str, output: Path, num_rounds: int, num_ranks: int) -> str:
    """One worker's samples at one number of ranks, and their table."""
    output.mkdir(parents=True, exist_ok=True)
    samples = _measure(worker, output, num_rounds, num_ranks)
    return _keep(output, samples, baseline, _machine(num_ranks, num_rounds))


def _share(seconds_per_check: list[float]) -> str:
    """A comparison every hundred steps, as a part of a step."""
    check = bootstrap(seconds_per_check)
    return (
        f"One comparison by itself: {check.value * 1e3:.2f} ms (95% interval {check.low * 1e3:.2f} "
        f"to {check.high * 1e3:.2f}), which every 100 steps is {check.value / 100 / 0.05:.3%} of a "
        "step of 50 ms."
    )


def _blocked(output: Path, num_ranks: int) -> str:
    """How long the step that began a save waited for it."""
    samples = json.loads((output / f"blocked-{num_ranks}.json").read_text())
    shown = ", ".join(f"{name} {median(v) * 1e3:.1f} ms" for name, v in samples.items())
    return f"A save kept its step waiting, {num_ranks} rank(s), median: {shown}."


def _measure(worker: str, output: Path, num_rounds: int, num_ranks: int) -> dict[str, Any]:
    require("matplotlib", extra="bench")
    raw = output / "samples.json"
    words = ["--nproc-per-node", str(num_ranks), "-m", f"benchmarks.steps.{worker}"]
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
        "device": _device(),
        **{name: version(name) for name in packages},
    }


def _device() -> str:
    name = own_accelerator().name
    return "cpu (not run on a GPU)" if own_accelerator().is_cpu else name

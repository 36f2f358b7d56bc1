"""`drivetrain plan` and `drivetrain probe`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Asked:
    """What was typed."""

    model: str
    words: tuple[str, ...]
    cluster: str
    objective: str
    global_batch_size: int | None
    sequence_length: int | None
    precision: str | None
    strategies: str
    steps: int | None
    deadline_h: float | None
    budget: float | None
    top: int


def run(asked: Asked, *, as_json: bool, picture: str | None, output: str | None) -> int:
    """Plan, and say so; 1 when nothing fits."""
    from drivetrain.cluster.file import load_cluster

    cluster = load_cluster(
        asked.cluster
    )  # before torch is loaded: a typing error is answered at once
    from drivetrain.cli.terminal import terminal
    from drivetrain.plan.plan import make_plan
    from drivetrain.plan.profile.profiling import Profiler
    from drivetrain.plan.profile.sources import find_subject
    from drivetrain.plan.show import show

    found = find_subject(asked.model, asked.words, asked.sequence_length)
    config = None if found.resolved is None else found.resolved.config
    plan = make_plan(Profiler(found.subject), cluster, question(asked, cluster.num_devices, config))
    if picture is not None:
        from drivetrain.plan.show import plot

        plot(plan, Path(picture))
    if output is not None:
        plan.write(Path(output))
    console = terminal(soft_wrap=True)
    if as_json:
        console.print(json.dumps(plan.to_dict(), indent=2), markup=False)
    else:
        show(plan, console, asked.top)
    return 0 if plan.best is not None else 1


def question(asked: Asked, num_devices: int, config: Any) -> Any:
    """From words and, where there is one, the script's config."""
    from drivetrain.core.errors import ConfigError, Problem
    from drivetrain.core.traits import STRATEGIES
    from drivetrain.plan.search import Question, proposed

    choices = {
        "--objective": (asked.objective, ("fastest", "cheapest", "fewest")),
        "--precision": (asked.precision or "bf16", ("fp32", "bf16", "fp16", "any")),
    }
    wrong = [
        Problem(flag, "unknown", f"use {', '.join(known)}", said)
        for flag, (said, known) in choices.items()
        if said not in known
    ]
    strategies = tuple(asked.strategies.split(",")) if asked.strategies else proposed()
    wrong += [
        Problem("--strategies", "unknown", f"use {', '.join(STRATEGIES.names)}, with commas", name)
        for name in strategies
        if name not in STRATEGIES.names
    ]
    needs_steps = asked.deadline_h is not None or asked.budget is not None
    steps = asked.steps or (config.max_steps if config is not None else None)
    if needs_steps and steps is None:
        rule = "a deadline or a budget needs the length of the run"
        wrong.append(Problem("--steps", rule, "add --steps N", has_value=False))
    if wrong:
        raise ConfigError(wrong)
    batch = asked.global_batch_size or (
        config.global_batch_size if config is not None else 2 * num_devices
    )
    precision = asked.precision or (config.precision.dtype if config is not None else "bf16")
    return Question(
        global_batch_size=batch,
        objective=asked.objective,  # type: ignore[arg-type]  # checked above
        precisions=("bf16", "fp32") if precision == "any" else (precision,),  # type: ignore[arg-type]
        strategies=strategies,
        steps=steps,
        deadline_s=None if asked.deadline_h is None else asked.deadline_h * 3600,
        budget=asked.budget,
    )


def probe(ranks: int, nodes: int, output: str) -> int:
    """Measure on real ranks, and write what was found as a cluster file."""
    import tempfile

    from drivetrain.cli.terminal import terminal
    from drivetrain.cluster.file import cluster_file, to_yaml
    from drivetrain.launch.guardian import guard

    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "probe.json"
        where = Path(output).resolve().parent
        words = ["--nproc-per-node", str(ranks), "--nnodes", str(nodes), "--spares", "0"]
        words += ["--max-restarts", "0", "-m", "drivetrain.plan.probe", str(raw), str(where)]
        code = guard(words)
        if code:
            return code
        file = cluster_file(json.loads(raw.read_text()))
    Path(output).write_text(to_yaml(file))
    console = terminal(soft_wrap=True)
    device = file.device
    if not isinstance(device, str) and device is not None:
        rates = ", ".join(f"{name} {rate:.3g}" for name, rate in device.peak_tflops.items())
        console.print(f"products, Tflop/s a rank: {rates}", markup=False)
        console.print(f"memory: {device.memory_gb_per_s:.1f} GB/s a rank", markup=False)
    if file.inside is not None and not isinstance(file.inside, str) and ranks * nodes > 1:
        link = file.inside
        console.print(f"ring: {link.gb_per_s:.2f} GB/s, {link.latency_us:.0f} µs", markup=False)
    console.print(f"storage: {file.storage_gb_per_s or 0:.2f} GB/s", markup=False)
    console.print(f"written: {output}", markup=False)
    return 0

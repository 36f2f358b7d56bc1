"""`drivetrain plan`, `probe`, `rehearse` and `simulate`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.core.errors import ConfigError, Problem

if TYPE_CHECKING:
    from drivetrain.plan.simulation.inputs import Inputs


# `drivetrain plan` and `drivetrain probe`.


@dataclass(frozen=True)
class PlanRequest:
    """The command's options, as typed."""

    model: str
    argv: tuple[str, ...]
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


_GATHERS = (
    "warning: the loss gathers the rows of all ranks (drivetrain.gather); this plan leaves out the "
    "memory and traffic of that, which `drivetrain rehearse` counts"
)


def run_plan(asked: PlanRequest, *, as_json: bool, picture: str | None, output: str | None) -> int:
    """Plan and print the result; return 1 if nothing fits."""
    from drivetrain.cluster.file import load_cluster

    cluster = load_cluster(
        asked.cluster
    )  # before torch is imported, so that a typo is reported at once
    from drivetrain.cli.say import say
    from drivetrain.cli.terminal import terminal
    from drivetrain.parallel.gather import was_left_out
    from drivetrain.plan.plan import make_plan
    from drivetrain.plan.profile.profiling import Profiler
    from drivetrain.plan.profile.sources import find_subject
    from drivetrain.plan.show import show

    found = find_subject(asked.model, asked.argv, asked.sequence_length)
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
    if was_left_out():
        say(_GATHERS, err=True)
    return 0 if plan.best is not None else 1


def question(asked: PlanRequest, num_devices: int, config: Any) -> Any:
    """The planner's question, from the options and the script's config if there is one."""
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
        configs_micro_batch_size=config.micro_batch_size if config is not None else "auto",
        steps=steps,
        deadline_s=None if asked.deadline_h is None else asked.deadline_h * 3600,
        budget=asked.budget,
    )


def run_probe(ranks: int, nodes: int, output: str) -> int:
    """Measure on real ranks, and write the result as a cluster file."""
    import tempfile

    from drivetrain.cli.terminal import terminal
    from drivetrain.cluster.file import cluster_file, to_yaml
    from drivetrain.launch.guardian import guard

    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "probe.json"
        where = Path(output).resolve().parent
        argv = ["--nproc-per-node", str(ranks), "--nnodes", str(nodes), "--spares", "0"]
        argv += ["--max-restarts", "0", "-m", "drivetrain.plan.probe", str(raw), str(where)]
        code = guard(argv)
        if code:
            return code
        file = cluster_file(json.loads(raw.read_text()))
    Path(output).write_text(to_yaml(file))
    console = terminal(soft_wrap=True)
    device = file.device
    if not isinstance(device, str) and device is not None:
        rates = ", ".join(f"{name} {rate:.3g}" for name, rate in device.peak_tflops.items())
        console.print(f"matrix products, Tflop/s per rank: {rates}", markup=False)
        console.print(f"memory: {device.memory_gb_per_s:.1f} GB/s per rank", markup=False)
    if file.inside is not None and not isinstance(file.inside, str) and ranks * nodes > 1:
        link = file.inside
        console.print(f"ring: {link.gb_per_s:.2f} GB/s, {link.latency_us:.0f} µs", markup=False)
    console.print(f"storage: {file.storage_gb_per_s or 0:.2f} GB/s", markup=False)
    console.print(f"written: {output}", markup=False)
    return 0


# `drivetrain rehearse`.

_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def run_rehearsal(
    argv: tuple[str, ...],
    world_size: int,
    ranks: str,
    device_memory: str | None,
    devices_per_node: int,
    *,
    as_json: bool,
) -> int:
    """Rehearse and print the findings; return 1 if one of them is an error."""
    from drivetrain.cli.terminal import terminal

    memory = None if device_memory is None else memory_size(device_memory)

    from drivetrain.rehearse.client import RehearsalRequest, rehearse
    from drivetrain.rehearse.show import as_dict, lines

    console = terminal(soft_wrap=True)
    with console.status("") as status:  # shown on a terminal only
        asked = RehearsalRequest(argv, world_size, ranks, memory, devices_per_node)
        rehearsal = rehearse(asked, status.update)
    if as_json:
        console.print(json.dumps(as_dict(rehearsal), indent=2), markup=False)
    else:
        for line in lines(rehearsal):
            console.print(line, markup=False)
    return 1 if any(not finding.is_warning for finding in rehearsal.findings) else 0


def memory_size(text: str, where: str = "--device-memory") -> int:
    """Bytes of a size such as 80G, 80GiB or 512M."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if found is None:
        problem = Problem(where, "not a size", "write 80G or 512M", text)
        raise ConfigError([problem])
    return int(float(found[1]) * _UNITS[found[2]])


# `drivetrain simulate`.

_FIELDS = {
    "nodes": "num_nodes",
    "mtbf": "node_mtbf_s",
    "days": "days",
    "policy": "policy",
    "step_time": "step_time_s",
    "checkpoint_interval": "interval_s",
    "save_cost": "save_s",
    "detect": "detect_s",
    "restart": "restart_s",
    "hardware": "hardware",
    "repair": "repair_s",
    "spares": "spares",
    "replicas": "num_replicas",
    "stall": "stall_s",
    "price": "price_per_device_hour",
    "devices_per_node": "devices_per_node",
    "replications": "replications",
    "seed": "seed",
}
_POLICIES = ("restart", "elastic", "live")


def run_simulation(flags: Mapping[str, Any], what_if: str, plot: str, *, as_json: bool) -> int:
    """Simulate and print the outcome."""
    from drivetrain.plan.simulation import outcome, show
    from drivetrain.plan.simulation.show import plot_what_if

    inputs = inputs_of(flags)
    if what_if:
        name, values = _changes(what_if)
        outcomes = outcome.what_if(inputs, name, values)
        shown = show.what_if_table(name, outcomes)
    else:
        name, outcomes = "policy", [outcome.outcome_of(inputs)]
        shown = show.lines(outcomes[0])
    if as_json:
        shown = [json.dumps([show.as_dict(each) for each in outcomes], indent=2)]
    elif what_if:
        shown = [*show.lines(outcomes[0])[:4], "", *shown]
    _print(shown)
    if plot:
        plot_what_if(name, outcomes, Path(plot))
        _print([f"\n  {plot}"])
    return 0


def run_published(folder: str) -> int:
    """Write the back-tests and goodput by size to a folder, as tables and a plot."""
    from drivetrain.plan.simulation import show
    from drivetrain.plan.simulation.outcome import curve, outcome_of
    from drivetrain.plan.simulation.published import ALL
    from drivetrain.plan.simulation.show import plot_curve

    output = Path(folder)
    output.mkdir(parents=True, exist_ok=True)
    results = [(run, outcome_of(run.inputs)) for run in ALL]
    table = [*show.published_table(results), ""]
    for run, _ in results:
        table.append(f"- {run.name}: {run.source}. Stated: {', '.join(run.stated)}. ")
        table[-1] += f"Assumed: {', '.join(run.assumed)}."
    curves = curve()
    table += ["", *show.curve_table(curves)]
    (output / "table.md").write_text("\n".join(table) + "\n")
    document = {
        "published": {run.name: show.as_dict(result) for run, result in results},
        "curve": {name: [show.as_dict(each) for each in made] for name, made in curves.items()},
    }
    (output / "outcomes.json").write_text(json.dumps(document, indent=1) + "\n")
    plot_curve(curves, output / "goodput.png")
    _print(table)
    return 0


def inputs_of(flags: Mapping[str, Any]) -> Inputs:
    """The simulation's inputs; ConfigError lists every problem."""
    from drivetrain.plan.simulation.inputs import Inputs

    problems: list[Problem] = []
    if not flags["nodes"]:
        problems.append(
            Problem("--nodes", "not given", "give the number of nodes that train", has_value=False)
        )
    if not flags["mtbf"]:
        remedy = "give one node's mean time between failures, such as 237d (Llama 3's)"
        problems.append(Problem("--mtbf", "not given", remedy, has_value=False))
    if problems:
        raise ConfigError(problems)
    values: dict[str, Any] = {}
    for word, field in _FIELDS.items():
        try:
            values[field] = _value(word, flags[word])
        except ConfigError as error:
            problems += error.problems
    for reader in (_correlated, _stragglers):
        try:
            values |= reader(flags)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return Inputs(**values)


def _value(word: str, said: Any) -> Any:
    from drivetrain.plan.simulation.inputs import seconds

    where = "--" + word.replace("_", "-")
    if word == "checkpoint_interval" and said == "auto":
        return None
    if word == "policy":
        if said not in _POLICIES:
            remedy = f"use {', '.join(_POLICIES[:-1])} or {_POLICIES[-1]}"
            raise ConfigError([Problem(where, "no such policy", remedy, said)])
        return said
    if _FIELDS[word].endswith("_s"):
        return seconds(str(said), where)
    if isinstance(said, str):
        try:
            return float(said) if "." in said or word == "price" else int(said)
        except ValueError:
            raise ConfigError([Problem(where, "not a number", "give a number", said)]) from None
    return said


def _correlated(flags: Mapping[str, Any]) -> dict[str, Any]:
    text = flags["correlated"]
    if not text:
        return {}
    parts = [part.strip() for part in text.lower().split("x")]
    try:
        per_day, nodes = float(parts[0]), int(parts[1])
    except (ValueError, IndexError):
        remedy = "write times per day x nodes, such as 0.1x16"
        raise ConfigError([Problem("--correlated", "not understood", remedy, text)]) from None
    return {"correlated_per_day": per_day, "correlated_nodes": nodes}


def _stragglers(flags: Mapping[str, Any]) -> dict[str, Any]:
    from drivetrain.plan.simulation.inputs import seconds

    text = flags["stragglers"]
    if not text:
        return {}
    parts = [part.strip() for part in text.lower().split("x")]
    if len(parts) != 3:
        remedy = "write mtbf x slowdown x time to detect, such as 1000d x 1.3 x 2h"
        raise ConfigError([Problem("--stragglers", "not understood", remedy, text)])
    where = "--stragglers"
    return {
        "straggler_mtbf_s": seconds(parts[0], where),
        "straggler_slowdown": seconds(parts[1], where),
        "straggler_s": seconds(parts[2], where),
    }


def _changes(text: str) -> tuple[str, list[Any]]:
    word, _, values = text.partition("=")
    word = word.strip().removeprefix("--").replace("-", "_")
    if word not in _FIELDS:
        near = get_close_matches(word, _FIELDS, 1)
        known = ", ".join(name.replace("_", "-") for name in _FIELDS)
        remedy = f"did you mean {near[0].replace('_', '-')}?" if near else f"use one of {known}"
        raise ConfigError([Problem("--what-if", "no such input", remedy, word)])
    chosen = [_value(word, value.strip()) for value in values.split(",") if value.strip()]
    if not chosen:
        raise ConfigError([Problem("--what-if", "no values", f"write {word}=1,2,3", text)])
    return _FIELDS[word], chosen


def _print(lines: list[str]) -> None:
    from drivetrain.cli.terminal import terminal

    console = terminal(soft_wrap=True)
    for line in lines:
        console.print(line, markup=False)

"""`drivetrain simulate`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.core.errors import ConfigError, Problem

if TYPE_CHECKING:
    from drivetrain.plan.simulation.inputs import Inputs

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


def run(words: Mapping[str, Any], what_if: str, plot: str, *, as_json: bool) -> int:
    """Simulate, and say what came of it."""
    from drivetrain.plan.simulation import outcome, show
    from drivetrain.plan.simulation.show import plot_what_if

    inputs = inputs_of(words)
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
    """The back-tests and the curve by size: tables and a picture in a folder."""
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


def inputs_of(words: Mapping[str, Any]) -> Inputs:
    """From what was typed; every mistake at once."""
    from drivetrain.plan.simulation.inputs import Inputs

    problems: list[Problem] = []
    if not words["nodes"]:
        problems.append(Problem("--nodes", "not given", "say how many train", has_value=False))
    if not words["mtbf"]:
        remedy = "say how long one node lasts, such as 237d (Llama 3's)"
        problems.append(Problem("--mtbf", "not given", remedy, has_value=False))
    if problems:
        raise ConfigError(problems)
    values: dict[str, Any] = {}
    for word, field in _FIELDS.items():
        try:
            values[field] = _value(word, words[word])
        except ConfigError as error:
            problems += error.problems
    for reader in (_correlated, _stragglers):
        try:
            values |= reader(words)
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
            raise ConfigError([Problem(where, "not a number", "give one", said)]) from None
    return said


def _correlated(words: Mapping[str, Any]) -> dict[str, Any]:
    text = words["correlated"]
    if not text:
        return {}
    parts = [part.strip() for part in text.lower().split("x")]
    try:
        per_day, nodes = float(parts[0]), int(parts[1])
    except (ValueError, IndexError):
        remedy = "write times a day x nodes, such as 0.1x16"
        raise ConfigError([Problem("--correlated", "not understood", remedy, text)]) from None
    return {"correlated_per_day": per_day, "correlated_nodes": nodes}


def _stragglers(words: Mapping[str, Any]) -> dict[str, Any]:
    from drivetrain.plan.simulation.inputs import seconds

    text = words["stragglers"]
    if not text:
        return {}
    parts = [part.strip() for part in text.lower().split("x")]
    if len(parts) != 3:
        remedy = "write mtbf x slowdown x until found, such as 1000d x 1.3 x 2h"
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

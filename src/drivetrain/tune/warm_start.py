"""Warm start: the sampler gets the finished trials of an earlier study before it draws the first.

They are copied when the study begins: the earlier study may continue, and the trials drawn here
must not depend on its progress.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drivetrain.core.bounded import read_json
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.core.files import write_whole
from drivetrain.tune.journal import read_journal
from drivetrain.tune.settings import Settings, Study, load_study
from drivetrain.tune.space import Choice, Parameter, Scalar, Space

FILE = "earlier.json"


def prepare(path: Path, settings: Settings, space: Space) -> list[dict[str, Any]] | None:
    """The trials to copy into a study; None if it has no warm start, or has copied them."""
    if not settings.warm_start or (path / FILE).exists():
        return None
    earlier = load_study(Path(settings.warm_start))
    before = earlier.settings
    if (before.metric, before.mode) != (settings.metric, settings.mode):
        rule = f"searched for {before.mode} {before.metric}"
        remedy = "use its --metric and --mode"
        raise ConfigError([Problem("--warm-start", rule, remedy, settings.warm_start)])
    state, found = read_journal(earlier.path), []
    for trial, asked in enumerate(state.asked):
        end = state.ended.get((trial, before.num_rungs - 1))
        if end is not None and end.value is not None:
            values = _shared(asked.values, space)
            found += [{"values": values, "value": end.value}] if values else []
    if not found:
        rule = "has no finished trial with one of these parameters"
        raise ConfigError([Problem("--warm-start", rule, "leave it out", settings.warm_start)])
    return found


def keep(study: Study, found: list[dict[str, Any]] | None) -> None:
    """Write the copied trials."""
    if found is not None:
        write_whole(study.path / FILE, json.dumps(found, indent=1) + "\n", sync=True)


def told(study: Study) -> list[tuple[dict[str, Scalar], float]]:
    """(values, result) of each copied trial."""
    if not study.settings.warm_start:
        return []
    return [(each["values"], float(each["value"])) for each in read_json(study.path / FILE)]


def _shared(values: Mapping[str, Scalar], space: Space) -> dict[str, Scalar]:
    """The values that the new space could have drawn."""
    parameters = space.parameters
    return {
        key: value
        for key, value in values.items()
        if key in parameters and _is_within(parameters[key], value)
    }


def _is_within(parameter: Parameter, value: Scalar) -> bool:
    if isinstance(parameter, Choice):
        return value in parameter.values
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not parameter.low <= float(value or 0) <= parameter.high:
        return False
    step = parameter.step
    times = 0.0 if step is None else (float(value or 0) - parameter.low) / step
    return abs(times - round(times)) < 1e-8

"""Space: the searched config keys, and the values each may take.

    parameters:
      optimization.learning_rate: {low: 1e-4, high: 1e-1, log: true}
      optimization.warmup_steps: {low: 0, high: 40, step: 10}
      optimization.optimizer: [adamw, sgd]
      optimization.momentum: {low: 0.0, high: 0.99, when: {optimization.optimizer: sgd}}
    constraints: ["optimization.warmup_steps < 1e4 * optimization.learning_rate"]

The same in Python: a file with `SPACE = Space({"optimization.learning_rate": Float(…), …})`, or a
dict of Ray Tune's domains (`tune.loguniform(…)`).
Everything is checked against the config's schema here, before a trial starts.
"""

from __future__ import annotations

import math
import runpy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import yaml

from drivetrain.config.keys import leaf_keys, walk_fields
from drivetrain.config.load import value_problems
from drivetrain.core import set_once
from drivetrain.core.bounded import parse_yaml, read_text
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.tune.constraints import holds, keys_of
from drivetrain.tune.ray_space import from_ray

Scalar = bool | int | float | str | None
When = Mapping[str, Sequence[Scalar]]
_OURS = ("stop_at_step", "early_stopping.limits", "output_dir", "name")
"""Set by the study for each trial."""


@dataclass(frozen=True)
class Float:
    """A number from `low` to `high`; `log`: every order of magnitude is equally likely."""

    low: float
    high: float
    log: bool = False
    step: float | None = None
    when: When = field(default_factory=dict)

    @property
    def ends(self) -> tuple[Scalar, ...]:
        """Values that represent the range when it is checked against the schema."""
        return (self.low, self.high)


@dataclass(frozen=True)
class Int:
    """An integer from `low` to `high`, both included."""

    low: int
    high: int
    log: bool = False
    step: int = 1
    when: When = field(default_factory=dict)

    @property
    def ends(self) -> tuple[Scalar, ...]:
        """Values that represent the range when it is checked against the schema."""
        return (self.low, self.high)


@dataclass(frozen=True)
class Choice:
    """One of a list of values."""

    values: tuple[Scalar, ...]
    when: When = field(default_factory=dict)

    @property
    def ends(self) -> tuple[Scalar, ...]:
        """All of them."""
        return self.values


Parameter = Float | Int | Choice


@dataclass(frozen=True)
class Space:
    """Parameters by config key, in the order in which they are drawn."""

    parameters: Mapping[str, Parameter]
    constraints: tuple[str, ...] = ()
    is_config: bool = True
    """Whether the keys are config keys; otherwise they are a user function's arguments."""

    def __post_init__(self) -> None:
        """Raise ConfigError with every problem."""
        if problems := [*_problems(self)]:
            raise ConfigError(problems)

    @property
    def numbers(self) -> dict[str, Float | Int]:
        """Ranges of which every trial has a value."""
        return {
            key: each
            for key, each in self.parameters.items()
            if not isinstance(each, Choice) and not each.when
        }

    def is_active(self, key: str, values: Mapping[str, Scalar]) -> bool:
        """Whether a trial with these values of the earlier keys has this key."""
        when = self.parameters[key].when
        return all(other in values and values[other] in wanted for other, wanted in when.items())

    def allows(self, values: Mapping[str, Scalar]) -> bool:
        """Whether the values satisfy all constraints."""
        return all(holds(each, values) for each in self.constraints)

    def as_dict(self) -> dict[str, Any]:
        """The space in the form of the YAML; `from_dict` reads it back."""
        return {
            "parameters": {key: _as_dict(each) for key, each in self.parameters.items()},
            "constraints": list(self.constraints),
            **({} if self.is_config else {"is_config": False}),
        }


def read_space(path: str | Path) -> Space:
    """Read a space from YAML, or from SPACE in a Python file."""
    file = Path(path)
    if not file.is_file():
        raise _wrong("--space", "no such file", "give a YAML or Python file", str(path))
    if file.suffix == ".py":
        found = runpy.run_path(str(file)).get("SPACE")
        if isinstance(found, Space):
            return found
        if isinstance(found, Mapping):
            return from_dict({"parameters": found})
        raise _wrong("--space", "has no SPACE", "write SPACE = Space({key: Float(…)})", str(path))
    try:
        return from_dict(parse_yaml(read_text(file), set_once.SafeLoader))
    except set_once.SetTwice as error:
        raise _wrong("--space", str(error), set_once.REMEDY, str(path)) from None
    except (yaml.YAMLError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise _wrong("--space", f"not YAML ({reason})", "fix the file", str(path)) from None


def from_dict(document: Any) -> Space:
    """The space of a YAML document; ConfigError lists every problem."""
    if not isinstance(document, Mapping) or not isinstance(document.get("parameters"), Mapping):
        raise _wrong("space", "has no parameters", "write parameters: {key: {low: …, high: …}}")
    if extra := document.keys() - {"parameters", "constraints", "is_config"}:
        raise _wrong("space", "unknown key", "use parameters, constraints", sorted(extra)[0])
    constraints = document.get("constraints") or []
    if not isinstance(constraints, list) or not all(isinstance(c, str) for c in constraints):
        raise _wrong("constraints", "must be a list of comparisons", '["a.b < c"]', constraints)
    parameters: dict[str, Parameter] = {}
    problems: list[Problem] = []
    for key, said in document["parameters"].items():
        try:
            parameters[str(key)] = _parameter(str(key), said)
        except ValueError as error:
            remedy = "write {low: …, high: …}, with log, step and when; or a list of values"
            problems.append(Problem(str(key), str(error), remedy, str(said)))
    if problems:
        raise ConfigError(problems)
    return Space(parameters, tuple(constraints), document.get("is_config") is not False)


def _takes_fractions(key: str) -> bool:
    """Whether the schema accepts a float for the key."""
    field = dict(walk_fields()).get(key)
    return field is not None and float in (field.annotation, *get_args(field.annotation))


def _parameter(key: str, said: Any) -> Parameter:
    if isinstance(said, Parameter):
        return said
    said = from_ray(said)
    if isinstance(said, list):
        return Choice(tuple(said))
    if not isinstance(said, Mapping):
        raise ValueError("is neither a range nor a list of values")
    if extra := said.keys() - {"low", "high", "log", "step", "when", "values", "type"}:
        raise ValueError(f"has an unknown key, {min(extra)}")
    when = {
        str(key): tuple(wanted) if isinstance(wanted, list) else (wanted,)
        for key, wanted in (said.get("when") or {}).items()
    }
    if "values" in said:
        return Choice(tuple(said["values"]), when)
    if "low" not in said or "high" not in said:
        raise ValueError("needs low and high")
    low, high = _number(said["low"]), _number(said["high"])
    step = None if said.get("step") is None else _number(said["step"])
    is_whole = all(isinstance(each, int) for each in (low, high, step or 1))
    # {low: 0, high: 1} of a weight decay is a range, not two values
    kind = "int" if is_whole and not _takes_fractions(key) else "float"
    if said.get("type", kind) == "int":
        if not is_whole:
            raise ValueError("is an int, but low, high or step is not a whole number")
        return Int(int(low), int(high), bool(said.get("log")), int(step or 1), when)
    return Float(float(low), float(high), bool(said.get("log")), step, when)


def _number(value: Any) -> int | float:
    """Parse a number; YAML reads 1e-4, without a dot, as a string."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"{value!r} is not a number")
    if isinstance(value, int):
        return value
    number = float(value)  # may raise ValueError
    if not math.isfinite(number):
        raise ValueError(f"{value!r} is not finite")
    return number


def _as_dict(parameter: Parameter) -> dict[str, Any]:
    when = {key: list(wanted) for key, wanted in parameter.when.items()}
    common = {"when": when} if when else {}
    if isinstance(parameter, Choice):
        return {"values": list(parameter.values), **common}
    kind = "int" if isinstance(parameter, Int) else "float"
    step = {} if parameter.step is None else {"step": parameter.step}
    both = {"low": parameter.low, "high": parameter.high, "log": parameter.log}
    return {"type": kind, **both, **step, **common}


def _problems(space: Space) -> Iterator[Problem]:
    if not space.parameters:
        yield Problem("space", "has no parameters", "name a config key", has_value=False)
    before: set[str] = set()
    for key, parameter in space.parameters.items():
        yield from _range_problems(key, parameter)
        yield from _when_problems(space, key, parameter, before)
        before.add(key)
        if not space.is_config:
            continue
        for value in parameter.ends if key in leaf_keys() else parameter.ends[:1]:
            yield from value_problems({key: value})
        if key in _OURS:
            yield Problem(key, "is set by the study", "leave it out", has_value=False)
    for text in space.constraints:
        try:
            strangers = keys_of(text) - space.parameters.keys()
        except ValueError as error:
            yield Problem("constraints", str(error), "for example: a.b < c", text)
            continue
        if strangers:
            rule = f"{min(strangers)} is not searched"
            yield Problem("constraints", rule, "name parameters, or write the number", text)
            continue
        try:
            holds(text, {key: each.ends[0] for key, each in space.parameters.items()})
        except (TypeError, IndexError) as error:
            yield Problem("constraints", str(error), "compare numbers with numbers", text)


def _range_problems(key: str, parameter: Parameter) -> Iterator[Problem]:
    if isinstance(parameter, Choice):
        if not parameter.values:
            yield Problem(key, "has no values", "write [one, another]", has_value=False)
        if not all(isinstance(each, Scalar) for each in parameter.values):
            yield Problem(
                key, "must be plain values", "write [one, another]", str(parameter.values)
            )
        return
    if parameter.low > parameter.high:
        yield Problem(key, "low is above high", "swap them", f"{parameter.low}…{parameter.high}")
    if parameter.step is not None and parameter.step <= 0:
        yield Problem(key, "step must be above 0", "leave it out", parameter.step)
    if parameter.log and parameter.low <= 0:
        yield Problem(key, "a logarithmic range must start above 0", "raise low", parameter.low)
    if parameter.log and parameter.step not in (None, 1):
        yield Problem(key, "a logarithmic range cannot have steps", "leave one out", parameter.step)


def _when_problems(
    space: Space, key: str, parameter: Parameter, before: set[str]
) -> Iterator[Problem]:
    for other, wanted in parameter.when.items():
        parent = space.parameters.get(other)
        if other not in before or not isinstance(parent, Choice):
            remedy = f"write a list of values for {other} above it"
            yield Problem(
                key, f"when: {other} is not a list of values before it", remedy, has_value=False
            )
        elif strangers := [each for each in wanted if each not in parent.values]:
            remedy = f"{other} has {', '.join(map(str, parent.values))}"
            yield Problem(key, f"when: {other} is never {strangers[0]}", remedy, has_value=False)


def short_key(key: str) -> str:
    """The last part of a key: optimization.learning_rate → learning_rate."""
    return key.rpartition(".")[2]


def short_value(value: object) -> str:
    """A value for a table, with a few digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _wrong(where: str, rule: str, remedy: str, value: Any = None) -> ConfigError:
    return ConfigError([Problem(where, rule, remedy, value, value is not None)])

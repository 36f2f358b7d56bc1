"""Loads a file and `path.to.key=value` arguments into one validated config.

One error lists all problems: wrong keys and values first, then values that conflict.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from drivetrain.config.command_line import argv_of_script, own_flags, with_engines_flags
from drivetrain.config.giving_way import give_way
from drivetrain.config.keys import flatten, leaf_keys, nearest_key, unflatten, walk_fields
from drivetrain.config.provenance import (
    ResolvedConfig,
    Source,
    said_by_file,
    said_by_script,
)
from drivetrain.config.rules import broken_rules
from drivetrain.config.schema import RunConfig
from drivetrain.core import set_once
from drivetrain.core.bounded import NotAFile, parse_yaml, read_text
from drivetrain.core.deprecation import CONFIG_KEYS, warn_renamed
from drivetrain.core.errors import ConfigError, DamagedRun, Problem
from drivetrain.core.flags import AFTER_SCRIPT, ALIASES
from drivetrain.core.hints import nearest
from drivetrain.core.redaction import REMOVED
from drivetrain.core.traits import known_as


class _Loader(set_once.SafeLoader):
    """Safe YAML without dates: a name such as 2024-01-05 is text."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}

_Said = dict[str, tuple[Any, Source]]


def load_config(
    path: str | Path | None = None,
    *,
    argv: Sequence[str] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> ResolvedConfig:
    """Load this script's config: its defaults, overridden by a file, then by the command line.

    `argv` may contain `--config FILE`, any number of `path.to.key=value`, and DeepSpeed's
    `--deepspeed_config FILE`. By default it is the script's command line (empty in a notebook and
    under pytest), and the script's own flags are left to the script. `defaults` are the script's
    values, nested or dotted.
    """
    if argv is None:
        own, left, problems = own_flags(with_engines_flags(argv_of_script()))
        file, overrides, more = _split(own, path)
        problems += more
    else:
        left = ()
        file, overrides, problems = _split(with_engines_flags(argv), path)
    said: _Said = said_by_script(defaults or {})
    if file is not None:
        found, file_problems = _read(file)
        if file_problems:  # the file's values are unknown, so nothing else can be checked
            raise ConfigError(file_problems)
        said |= found
    for word in overrides:
        key, _, text = word.partition("=")
        said[key] = (_parse(text), Source("command line"))
    return replace(_check(said, problems), left_to_script=left)


def resolve(config: RunConfig | ResolvedConfig | Mapping[str, Any]) -> ResolvedConfig:
    """Return a config of any form, validated, with the source of each value."""
    if isinstance(config, ResolvedConfig):
        return config
    if isinstance(config, RunConfig):
        config = config.model_dump(mode="json", exclude_unset=True)
    return _check(said_by_script(config), [])


def _split(
    words: Sequence[str], path: str | Path | None
) -> tuple[Path | None, list[str], list[Problem]]:
    file = Path(path) if path is not None else None
    overrides: list[str] = []
    problems: list[Problem] = []
    rest = iter(words)
    is_after_flag = False
    for word in rest:
        is_value, is_after_flag = is_after_flag, False
        is_flag = word.startswith("-") and not word[1:2].isdigit()  # -1 is a value
        if word == "--config":
            file = Path(next(rest, ""))
        elif word.startswith("--config="):
            file = Path(word.partition("=")[2])
        elif "=" in word and not word.startswith("-"):
            overrides.append(word)
        elif is_value and not is_flag:
            is_after_flag = True  # of a flag that is refused already; it may have several
        elif not is_flag and word.endswith((".yaml", ".yml")):
            raise ConfigError([_without_its_flag(word)])
        else:
            is_after_flag = is_flag and "=" not in word
            remedy = "write path.to.key=value"
            if is_flag:
                remedy += "; flags of the script need the script's own parser"
            problems.append(Problem(word, "not an override", remedy, has_value=False))
    return file, overrides, problems


def _without_its_flag(file: str) -> Problem:
    """Return the only problem to report: the file's values are unknown."""
    remedy = f"write --config {file}"
    return Problem(file, "a config file is given with its flag", remedy, has_value=False)


def _read(file: Path) -> tuple[_Said, list[Problem]]:
    text = ""
    try:
        text = read_text(file)
        document = parse_yaml(text, _Loader) or {}
    except (OSError, ValueError, DamagedRun, yaml.YAMLError) as error:
        return {}, [Problem("--config", *_why_unreadable(error, text), str(file))]
    if not isinstance(document, dict):
        return {}, [
            Problem("--config", "contains no keys", "write key: value lines", str(file)),
        ]
    recorded: Any = {}
    if set(document) == {"config", "sources"} and isinstance(document["config"], dict):
        # a run's own run.yaml is loaded again
        recorded, document = document["sources"], document["config"]
    values = flatten({str(key): value for key, value in document.items()})
    return said_by_file(values, file, recorded if isinstance(recorded, dict) else {}), []


def _why_unreadable(error: Exception, text: str) -> tuple[str, str]:
    """Return the rule that a file breaks, and what to do."""
    if isinstance(error, set_once.SetTwice):
        return str(error), set_once.REMEDY
    if isinstance(error, yaml.YAMLError):
        return _yaml_reason(error, text)
    if isinstance(error, NotAFile):
        return error.rule, "give the path of a YAML file"
    return getattr(error, "strerror", None) or str(error), "give the path of a YAML file"


def _yaml_reason(error: yaml.YAMLError, text: str) -> tuple[str, str]:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        place = f"not YAML at line {mark.line + 1}, column {mark.column + 1}"
        if _is_tab(mark, text):
            return f"{place}: a tab, and YAML is indented with spaces", "write spaces there"
        return f"{place} ({error.problem})", "fix the YAML"
    return f"not YAML ({error})", "fix the YAML"


def _is_tab(mark: Any, text: str) -> bool:
    """Whether a tab is where the parser could not go on; it only says "a character"."""
    line = (text.split("\n")[mark.line : mark.line + 1] or [""])[0]
    return line[mark.column : mark.column + 1] == "\t"


def _parse(text: str) -> Any:
    try:
        return parse_yaml(text, _Loader)
    except (ValueError, yaml.YAMLError):
        return text


def _check(said: _Said, problems: list[Problem]) -> ResolvedConfig:
    said, twice = _renamed(said)
    said = give_way(said)
    problems = problems + twice
    # a section with nothing under it sets nothing
    said = {key: entry for key, entry in said.items() if entry[0] is not None or not _inside(key)}
    values = {key: value for key, (value, _) in said.items()}
    problems = problems + _field_problems(values)
    wrong = frozenset(problem.where for problem in problems)
    good = {key: value for key, value in values.items() if key in leaf_keys() and key not in wrong}
    placeholder = {"global_batch_size": 1} if "global_batch_size" in wrong else {}
    config = RunConfig.model_validate(unflatten({**placeholder, **good}))
    problems += broken_rules(config, wrong)
    if problems:
        raise ConfigError(problems)
    return ResolvedConfig(config, {key: source for key, (_, source) in said.items()})


def _renamed(said: _Said) -> tuple[_Said, list[Problem]]:
    """Rename old keys to their new names; a problem if both are set."""
    problems = []
    for old in said.keys() & CONFIG_KEYS.keys():
        new = CONFIG_KEYS[old].new
        value, source = said[old]
        if new in said:
            rule = f"is the old name of {new}, which is set as well"
            problems.append(Problem(old, rule, "remove one of them", value))
        else:
            warn_renamed(old, CONFIG_KEYS[old])
            said = said | {new: (value, source)}
    return {key: entry for key, entry in said.items() if key not in CONFIG_KEYS}, problems


def _removed(key: str, value: Any) -> Problem:
    rule = "a password was removed from it when the run was recorded"
    return Problem(key, rule, f"set it again: {key}=…", value)


def _field_problems(values: Mapping[str, Any]) -> list[Problem]:
    known = {key: value for key, value in values.items() if key in leaf_keys()}
    problems = [_unknown(key, value) for key, value in values.items() if key not in known]
    problems += [_removed(key, value) for key, value in known.items() if REMOVED in str(value)]
    try:
        RunConfig.model_validate(unflatten(known))
    except ValidationError as error:
        by_key: dict[str, list[ErrorDetails]] = {}
        for details in error.errors():
            by_key.setdefault(_where(details), []).append(details)
        problems += [_explain(where, arms) for where, arms in by_key.items()]
    return problems


def value_problems(values: Mapping[str, Any]) -> list[Problem]:
    """Return the problems of these keys' values alone, without checking for required keys."""
    found = _field_problems({"global_batch_size": 1, **values})
    return [problem for problem in found if problem.where in values]


def _inside(section: str) -> list[str]:
    return [path for path in leaf_keys() if path.startswith(f"{section}.")]


def _unknown(key: str, value: Any) -> Problem:
    inside = _inside(key)
    if inside:
        return Problem(key, "is a section, not a value", f"set a key inside it: {inside[0]}", value)
    flag = f"--{key.replace('_', '-')}"
    if flag in AFTER_SCRIPT | ALIASES.keys():
        remedy = f"write drivetrain train SCRIPT {flag} {value}"
        return Problem(key, "is not a key but a flag of the launcher", remedy, value)
    near = nearest_key(key)
    remedy = f"did you mean {near}?" if near else "`drivetrain config` lists all keys"
    return Problem(key, "unknown key", remedy, _as_in_yaml(value))


def _as_in_yaml(value: Any) -> Any:
    """Return how YAML writes null, true and false; other values as they are."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else value


def _explain(where: str, arms: Sequence[ErrorDetails]) -> Problem:
    """Return one problem for a key; pydantic reports each arm of a union ("number or auto")."""
    first = arms[0]
    if first["type"] == "missing":
        return Problem(
            where, "required, but not set", f"add it, for example {where}=64", has_value=False
        )
    rule = "must be " + " or ".join(_rule(details) for details in arms)
    return Problem(where, rule, _remedy(where, arms), _as_in_yaml(first["input"]))


def _where(details: ErrorDetails) -> str:
    parts = [str(part) for part in details["loc"]]
    # pydantic appends the arm of a union, or the index in a list, to the key's own path
    while len(parts) > 1 and ".".join(parts) not in leaf_keys():
        parts.pop()
    return ".".join(parts)


_PLAIN_RULES = {
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_parsing": "a number",
    "float_type": "a number",
    "bool_parsing": "true or false",
    "bool_type": "true or false",
}


def _rule(details: ErrorDetails) -> str:
    return _PLAIN_RULES.get(details["type"], details["msg"].removeprefix("Input should be "))


def _remedy(where: str, arms: Sequence[ErrorDetails]) -> str:
    for details in arms:
        if details["type"] == "literal_error":
            options = re.findall(r"'([^']+)'", details["ctx"]["expected"])
            elsewhere = known_as() if where == "parallel.strategy" else {}
            near = nearest(str(details["input"]), options, elsewhere)
            if near:
                return f"did you mean {near}?"
    field = dict(walk_fields())[where]
    if field.is_required():
        return f"for example {where}=64"
    if field.default is None:
        return "correct it, or leave it out"
    return f"the default is {field.default}"

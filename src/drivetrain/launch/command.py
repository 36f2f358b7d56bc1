"""Parsing the command line of `drivetrain train`.

    drivetrain train [flags] SCRIPT [flags] [the script's own arguments]

Flags are torchrun's, read from torchrun's own parser so that none is missing, and their aliases
(`--script`, `--num-gpus` …). After the script, only flags that no script is likely to have
(`AFTER_SCRIPT`) are recognized; the first argument that is not one of them begins the script's
arguments, and `--` ends the search. A script may have flags of its own that are called like other
flags of the launcher (`--log-dir`, `--time`), so those are passed to it, with a note to the user.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from drivetrain.core.errors import ConfigError, Problem
from drivetrain.core.flags import AFTER_SCRIPT, ALIASES, nearest_flag
from drivetrain.launch.flag_values import value_problem


class HelpAsked(Exception):
    """--help was given before the script."""


@dataclass(frozen=True)
class Command:
    """A script, its arguments, and the flags for starting its ranks."""

    script: str
    script_args: tuple[str, ...]
    launcher_args: tuple[str, ...]
    """Flags in torchrun's spelling."""
    passed_flags: tuple[str, ...] = field(default=(), compare=False)
    """The launcher's flags that are among the script's arguments, and were not put after `--`."""

    @property
    def is_module(self) -> bool:
        """Whether the script is given as a module (-m)."""
        return not {"-m", "--module"}.isdisjoint(self.launcher_args)

    @property
    def torchrun_args(self) -> list[str]:
        """The same as torchrun's arguments."""
        return [*self.launcher_args, self.script, *self.script_args]


def add_our_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that torchrun does not have."""
    parser.add_argument("--run-dir", default=None)
    parser.add_argument("--accept-change", action="append", default=[])
    parser.add_argument("--live", action="store_true")
    parser.add_argument("--spares", type=int, default=None)
    parser.add_argument("--warm-start", action="store_true")
    parser.add_argument("--grace-period", type=float, default=30.0)
    parser.add_argument("--stall-timeout", type=float, default=60.0)
    parser.add_argument("--slow-timeout", type=float, default=900.0)
    parser.add_argument("--max-preemptions", type=int, default=1000)
    parser.add_argument("--max-startup-failures", type=int, default=3)


def parse_command(
    argv: Sequence[str],
    torchrun: argparse.ArgumentParser,
    aliases: Mapping[str, str] = ALIASES,
    after_script: Collection[str] = AFTER_SCRIPT,
) -> Command:
    """Parse a command line; torchrun's parser defines the known flags."""
    takes_value = _flags(torchrun)
    queue = list(argv)
    launcher: list[str] = []
    settings: tuple[str, ...] = ()
    script: str | None = None
    problems: list[Problem] = []
    is_positional = False  # after --script, all flags are still recognized
    while queue and queue[0] != "--":
        word = queue[0]
        name = _name(word)
        flag = name if is_positional else aliases.get(name, name)
        if not is_positional and flag in _OWN:
            value = _value(queue, word)
            if flag == "--script":
                script = value
            else:
                settings = _settings(value)
                launcher += ["--on=ray"] if value == "ray" else []
        elif flag in takes_value and (not is_positional or flag in after_script):
            problems += _take(queue, flag, launcher, takes_value=takes_value[flag])
        elif script is None and not word.startswith("-"):
            script, is_positional = queue.pop(0), True
        elif script is None:
            raise _not_a_flag(word, takes_value)
        else:
            break
    if script is None:
        problems.append(_NO_SCRIPT)
    if problems or script is None:
        raise ConfigError(problems)
    if queue[:1] == ["--"]:
        return Command(script, (*settings, *queue[1:]), tuple(launcher))
    known = {*takes_value, *aliases, *_OWN}
    passed = [name for name in map(_name, queue) if name.startswith("--") and name in known]
    return Command(script, (*settings, *queue), tuple(launcher), tuple(dict.fromkeys(passed)))


_OWN = ("--script", "--backend")
"""Flags that torchrun's parser does not have, with a meaning only before the script."""
_NO_SCRIPT = Problem("SCRIPT", "not given", "drivetrain train your_script.py", has_value=False)


def _name(word: str) -> str:
    """`--nproc_per_node=2` → `--nproc-per-node`."""
    name = word.partition("=")[0]
    return name.replace("_", "-") if name.startswith("--") else name


def _take(
    queue: list[str], flag: str, launcher: list[str], *, takes_value: bool
) -> Sequence[Problem]:
    """Move the flag at the head of the queue to the launcher's; return what is wrong with it."""
    word = queue[0]
    if not takes_value:
        queue.pop(0)
        launcher.append(flag)
        name, has_value, value = word.partition("=")
        remedy = f"write {name} alone, or leave it out"
        return [Problem(name, "takes no value", remedy, value)] if has_value else []
    value = _value(queue, word)
    launcher.append(f"{flag}={value}")
    problem = value_problem(flag, value, _name(word))
    return [problem] if problem else []


def _flags(torchrun: argparse.ArgumentParser) -> dict[str, bool]:
    """Return torchrun's flags, with dashes, and whether each takes a value."""
    return {
        option.replace("_", "-") if option.startswith("--") else option: action.nargs != 0
        for action in torchrun._actions  # noqa: SLF001 - argparse has no public list of flags
        for option in action.option_strings
        if option not in ("-h", "--help")
    }


def _value(queue: list[str], word: str) -> str:
    """Remove the flag at the head of the queue with its value; return the value."""
    queue.pop(0)
    _, has_value, value = word.partition("=")
    if has_value:
        return value
    if not queue:
        raise ConfigError([Problem(word, "needs a value", f"{word} VALUE", has_value=False)])
    return queue.pop(0)


def _settings(backend: str) -> tuple[str, ...]:
    backends = _backends()
    if backend not in backends:
        remedy = f"use one of {', '.join(backends)}"
        raise ConfigError([Problem("--backend", "no such backend", remedy, backend)])
    return backends[backend]


def _backends() -> dict[str, tuple[str, ...]]:
    """Return the values of --backend with their config arguments; ray is a target.

    TensorFlow's ranks are started like any others; its own trainer makes them workers.
    """
    from drivetrain.core.traits import STRATEGIES, all_traits  # loads pydantic, so only when needed

    default = STRATEGIES.names[0]
    named = {
        backend: () if each.name == default else (f"parallel.strategy={each.name}",)
        for each in all_traits()
        for backend in each.backends
    }
    return {**named, "ray": (), "tensorflow": ()}


def _not_a_flag(word: str, known: Collection[str]) -> Exception:
    if word in ("-h", "--help"):
        return HelpAsked()
    near = nearest_flag(_name(word), [*known, *ALIASES, *_OWN])
    remedy = f"did you mean {near}?" if near else "the script's own flags go after the script"
    return ConfigError([Problem(word, "unknown flag", remedy, has_value=False)])


def parse_flags(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse flags; what argparse refuses is a ConfigError, without argparse's usage text."""

    def refuse(message: str) -> None:
        where, _, rule = message.removeprefix("argument ").partition(": ")
        flag = where.partition("/")[0]  # --numa-binding/--numa_binding
        raise ConfigError([Problem(flag, rule, "see drivetrain train --help", has_value=False)])

    parser.allow_abbrev = False  # argparse would look for prefixes among the script's flags, too
    parser.error = refuse  # type: ignore[assignment, method-assign]
    return parser.parse_args(list(argv))


def note_on(passed_flags: Sequence[str], script: str) -> str:
    """Return a note for the user: the script got flags which the launcher has as well."""
    stands, was, it = (
        ("stands", "was", "it") if len(passed_flags) == 1 else ("stand", "were", "them")
    )
    return (
        f"note: {', '.join(passed_flags)} {stands} after {script} and {was} passed to it; to set "
        f"Drivetrain's, put {it} before the script; put -- after the script to silence this note"
    )


SWITCHES = ("--standalone", "--module", "-m", "--no-python", "--run-path", "--virtual-local-rank")
WITH_VALUE = (
    "--nnodes",
    "--nproc-per-node",
    "--rdzv-backend",
    "--rdzv-endpoint",
    "--rdzv-id",
    "--rdzv-conf",
    "--max-restarts",
    "--monitor-interval",
    "--start-method",
    "--event-log-handler",
    "--role",
    "--log-dir",
    "--redirects",
    "-r",
    "--tee",
    "-t",
    "--local-ranks-filter",
    "--duplicate-stdout-filters",
    "--duplicate-stderr-filters",
    "--node-rank",
    "--master-addr",
    "--master-port",
    "--local-addr",
    "--logs-specs",
    "--numa-binding",
    "--signals-to-handle",
    "--shutdown-timeout",
)


def add_torchruns_flags(parser: argparse.ArgumentParser) -> None:
    """Add torchrun's flags: their names, and whether they take a value."""
    for flag in SWITCHES:
        parser.add_argument(flag, action="store_true")
    for flag in WITH_VALUE:
        parser.add_argument(flag)

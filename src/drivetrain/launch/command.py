"""Parsing the command line of `drivetrain train`.

    drivetrain train [flags] SCRIPT [flags] [the script's own arguments]

Flags are torchrun's, read from torchrun's own parser so that none is missing, and their aliases
(`--script`, `--num-gpus` …). After the script, only flags that start ranks are recognized; the
first argument that is not one of them begins the script's arguments, and `--` ends the search.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from drivetrain.core.errors import ConfigError, Problem
from drivetrain.core.flags import AFTER_SCRIPT, ALIASES, OF_OTHER_TOOLS
from drivetrain.core.hints import nearest


class HelpAsked(Exception):
    """--help was given before the script."""


@dataclass(frozen=True)
class Command:
    """A script, its arguments, and the flags for starting its ranks."""

    script: str
    script_args: tuple[str, ...]
    launcher_args: tuple[str, ...]
    """Flags in torchrun's spelling."""

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
    is_positional = False  # after --script, all flags are still recognized
    while queue:
        word = queue[0]
        name, has_value, _ = word.partition("=")
        name = name.replace("_", "-") if name.startswith("--") else name
        flag = name if is_positional else aliases.get(name, name)
        if word == "--":
            queue.pop(0)
            break
        if not is_positional and flag in ("--script", "--backend"):
            value = _value(queue, word)
            if flag == "--script":
                script = value
            else:
                settings = _settings(value)
                launcher += ["--on=ray"] if value == "ray" else []
        elif flag in takes_value and (not is_positional or flag in after_script):
            if takes_value[flag]:
                launcher.append(f"{flag}={_value(queue, word)}")
            else:
                queue.pop(0)
                launcher.append(flag)
        elif script is None and not word.startswith("-"):
            script, is_positional = queue.pop(0), True
        elif script is None:
            raise _not_a_flag(word, has_value, takes_value)
        else:
            break
    if script is None:
        raise ConfigError(
            [Problem("SCRIPT", "not given", "drivetrain train your_script.py", has_value=False)]
        )
    return Command(script, (*settings, *queue), tuple(launcher))


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


def _not_a_flag(word: str, has_value: str, known: dict[str, bool]) -> Exception:
    if word in ("-h", "--help"):
        return HelpAsked()
    name = word.partition("=")[0] if has_value else word
    flags = [*known, *ALIASES, "--script", "--backend"]
    near = nearest(name.replace("_", "-"), flags, OF_OTHER_TOOLS)
    remedy = f"did you mean {near}?" if near else "the script's own flags go after the script"
    return ConfigError([Problem(word, "unknown flag", remedy, has_value=False)])


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

"""Names, options and help of the commands. Their code is imported when they are called."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from drivetrain.core.errors import ConfigError, Problem
from drivetrain.core.flags import values_of


class Verbs(TyperGroup):
    """Lists commands with the whole first sentence of their help; click cuts it to one line.

    Wrong usage is refused as everywhere in Drivetrain, in one line: what, why, what to do.
    """

    def make_context(self, info_name: Any, args: list[str], *more: Any, **extra: Any) -> Any:
        with _refused_in_one_line(list(args)):
            return super().make_context(info_name, args, *more, **extra)

    def invoke(self, ctx: Any) -> Any:
        with _refused_in_one_line(list(ctx.args)):
            return super().invoke(ctx)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        listed = [(name, self.commands[name]) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, verb.get_short_help_str(limit=1000)) for name, verb in listed]
            )


_USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]
"""Base class of the errors in a command line, which typer does not export."""


@contextmanager
def _refused_in_one_line(argv: Sequence[str]) -> Iterator[None]:
    try:
        yield
    except _USAGE_ERROR as error:
        problem = _wrong_value(error, argv) or _wrong_usage(error)
        if problem is None:
            raise
        raise ConfigError([problem]) from None


_NO_VALUE = "needs a value"
_USAGES = (
    (re.compile(r"Missing \w+ '(?P<what>[^']+)'"), "not given"),
    (re.compile(r"No such option:? '?(?P<what>-[\w-]+)"), "unknown option"),
    (re.compile(r"No such command '(?P<what>[^']+)'"), "unknown command"),
    (re.compile(r"Option '(?P<what>[^']+)' requires an argument"), _NO_VALUE),
    (re.compile(r"Got unexpected extra arguments?(?:\(s\))? \((?P<what>.+)\)"), "not expected"),
)
"""The beginnings of typer's other messages, and the same in few words."""
_MEANT = re.compile(r"Did you mean '?([^'?]+)'?\?")


def _wrong_usage(error: Any) -> Problem | None:
    """Return the problem with a command line; None for one that is not known here."""
    said = error.format_message()
    for pattern, rule in _USAGES:
        if found := pattern.match(said):
            command = "drivetrain" if error.ctx is None else error.ctx.command_path
            meant = _MEANT.search(said)
            remedy = f"did you mean {meant[1]}?" if meant else f"{command} --help"
            if rule == _NO_VALUE:
                remedy = f"{found['what']} VALUE"
            return Problem(found["what"], rule, remedy, has_value=False)
    return None


_PLAIN_RULES = (
    (re.compile("integer"), "must be a whole number"),
    (re.compile("number|float"), "must be a number"),
    (re.compile(r"(?:greater than or equal to|range x>=) ?([\d.e-]+)"), r"must be at least \1"),
)
"""typer's messages, which differ between its versions, and the same in few words."""


def _wrong_value(error: Any, argv: Sequence[str]) -> Problem | None:
    """Return the problem that an error is about; None if no option with a value is."""
    options = getattr(getattr(error, "param", None), "opts", ())
    found = [(flag, values) for flag in options if (values := values_of(argv, flag))]
    if not found:
        return None
    flag, values = found[0]
    shown = values if getattr(error.param, "multiple", False) else values[-1:]
    said = error.message.removeprefix("Value error, ").rstrip(".")
    rules = [match.expand(rule) for p, rule in _PLAIN_RULES if (match := p.search(said))]
    command = "drivetrain" if error.ctx is None else error.ctx.command_path
    rule = rules[0] if rules else said[:1].lower() + said[1:]
    return Problem(flag, rule, f"{command} --help", ", ".join(shown))


# Arguments and options of several commands.

Run = Annotated[str, typer.Argument(metavar="RUN", help="Directory of the run.")]

RunAddress = Annotated[
    str, typer.Argument(metavar="RUN", help="A run's directory, or its address (s3://…).")
]

Address = Annotated[
    str, typer.Argument(help="A run's directory, a folder of checkpoints, or an address (s3://…).")
]

OneCheckpoint = Annotated[
    str, typer.Argument(help="A checkpoint; for a run or a folder, its newest good one.")
]

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

Trust = Annotated[
    bool, typer.Option("--trust", help="Act although other users could have written its job.json.")
]

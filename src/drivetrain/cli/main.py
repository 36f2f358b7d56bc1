"""`drivetrain`: commands import their code when they are called, so that help is fast."""

from __future__ import annotations

import copy
import sys
from collections.abc import Collection
from typing import Annotated

import typer
from typer.main import get_command_name
from typer.models import CommandInfo

from drivetrain._version import __version__
from drivetrain.cli.commands import (
    Verbs,
    benching,
    checking,
    checkpoints,
    learning,
    looking,
    planning,
    running,
    tuning,
)
from drivetrain.cli.say import say
from drivetrain.core.errors import ConfigError, DrivetrainError

app = typer.Typer(
    cls=Verbs,
    help="One training script, from a laptop to thousands of devices, with the same numbers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for group in (running, looking, planning, checking):
    app.add_typer(group.verbs)
app.add_typer(checking.certificate_verbs, name="verify")
app.add_typer(checkpoints.verbs, name="checkpoint")
app.add_typer(tuning.verbs, name="tune")
app.add_typer(benching.verbs, name="bench")
app.add_typer(learning.verbs, name="learn")


def _show_version(value: bool) -> None:
    if value:
        say(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    pass


def with_flags_of(whole: typer.Typer, argv: Collection[str]) -> typer.Typer:
    """The same commands, with flags only for those that argv names; the others are just listed.

    Building the flags of all commands takes longer than most of them run.
    """
    narrow = copy.copy(whole)
    # `tune SCRIPT` means `tune run SCRIPT`
    named = {*argv, getattr(whole.info.cls, "default_verb", "")}
    narrow.registered_commands = [
        verb if _name_of(verb) in named else _just_listed(verb)
        for verb in whole.registered_commands
    ]
    narrow.registered_groups = [copy.copy(group) for group in whole.registered_groups]
    for group in narrow.registered_groups:
        if group.typer_instance is None:
            continue
        if isinstance(group.name, str) and group.name not in argv:
            group.typer_instance = _without_verbs(group.typer_instance)
        else:  # named, or its commands are listed at the top level
            group.typer_instance = with_flags_of(group.typer_instance, argv)
    return narrow


def _without_verbs(group: typer.Typer) -> typer.Typer:
    """A group without its commands: argv does not name it, so only the group itself is listed."""
    empty = copy.copy(group)
    empty.registered_commands, empty.registered_groups = [], []
    return empty


def _name_of(verb: CommandInfo) -> str:
    return verb.name or get_command_name(getattr(verb.callback, "__name__", ""))


def _just_listed(verb: CommandInfo) -> CommandInfo:
    def no_flags() -> None:
        raise AssertionError(f"{_name_of(verb)} was called without being named on the command line")

    no_flags.__doc__ = verb.callback.__doc__
    listed = copy.copy(verb)
    listed.name, listed.callback = _name_of(verb), no_flags
    return listed


def main() -> None:
    """Run the console script; a DrivetrainError is printed without traceback."""
    try:
        with_flags_of(app, sys.argv[1:])()
    except ConfigError as error:
        say(str(error), err=True)
        sys.exit(error.exit_code)
    except DrivetrainError as error:
        say(f"error: {error}", err=True)
        sys.exit(error.exit_code)

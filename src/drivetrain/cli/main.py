"""`drivetrain`: verbs are imported when they are called, so that help answers at once."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from drivetrain._version import __version__
from drivetrain.cli.commands import (
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


def main() -> None:
    """The console script: errors on purpose are shown as they are, with their exit code."""
    try:
        app()
    except ConfigError as error:
        say(str(error), err=True)
        sys.exit(error.exit_code)
    except DrivetrainError as error:
        say(f"error: {error}", err=True)
        sys.exit(error.exit_code)

"""docs/cli.md: every command with its own help."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from drivetrain.cli.main import app

_WIDE: dict[str, Any] = {"terminal_width": 100, "max_content_width": 100}
_TOP = """# Commands

What `drivetrain COMMAND --help` says, for every command; written by `make pages`. What a command's
exit code means: [exit codes](exit-codes.md).
"""


def page() -> str:
    root = typer.main.get_command(app)
    commands = dict(_commands(root, typer.Context(root, info_name="drivetrain", **_WIDE)))
    parts = [_TOP, "| command | what it does |", "| --- | --- |"]
    for name, context in commands.items():
        anchor = f"#drivetrain-{name.replace(' ', '-')}"
        parts.append(f"| [`{name}`]({anchor}) | {_first_sentence(context.command.help or '')} |")
    parts.append("")
    for name, context in commands.items():
        parts += [f"## drivetrain {name}", "", f"```text\n{_help(context)}```", ""]
    return "\n".join(parts)


def _commands(command: Any, context: typer.Context) -> Iterator[tuple[str, typer.Context]]:
    children = getattr(command, "commands", None)
    if children is None:
        yield context.command_path.removeprefix("drivetrain "), context
        return
    for name, child in children.items():
        if not child.hidden:
            settings = child.context_settings | _WIDE
            inside = typer.Context(child, info_name=name, parent=context, **settings)
            yield from _commands(child, inside)


def _first_sentence(text: str) -> str:
    sentence = " ".join(text.split("\n\n", maxsplit=1)[0].split())
    for mark, escaped in (("|", "\\|"), ("<", "&lt;"), ("[", "\\[")):
        sentence = sentence.replace(mark, escaped)
    return sentence


def _help(context: typer.Context) -> str:
    lines = context.get_help().strip("\n").splitlines()
    return "\n".join(line.rstrip() for line in lines) + "\n"

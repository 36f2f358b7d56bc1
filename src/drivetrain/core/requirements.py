"""Checks for optional libraries and for Linux; errors say what to install or do instead."""

from __future__ import annotations

import importlib
import json
import os
import platform
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

from drivetrain.core.errors import EnvironmentProblem, Problem

# Optional libraries are imported where they are used; the error names the extra to install.


def comes_from(library: str, value: object) -> bool:
    """Whether the value's class is one of a library's, which need not be installed to ask."""
    return type(value).__module__.partition(".")[0] == library


def require(module: str, *, extra: str) -> ModuleType:
    """Import `module`; EnvironmentProblem names the extra of Drivetrain that installs it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise EnvironmentProblem(
            [
                Problem(
                    where=module,
                    rule="this optional library is not installed",
                    remedy=install_command(extra),
                    has_value=False,
                )
            ]
        ) from error


def install_command(extra: str) -> str:
    """Return the command that adds an extra to this installation of Drivetrain."""
    from importlib.metadata import PackageNotFoundError, distribution  # takes a tenth of a second

    try:
        found = distribution("drivetrain").read_text("direct_url.json")
    except PackageNotFoundError:  # not installed, but on Python's path
        found = None
    return command_for(extra, found)


def command_for(extra: str, direct_url: str | None) -> str:
    """Return the command; `direct_url` is what pip recorded of an installation from a folder."""
    record = json.loads(direct_url or "{}")
    if "dir_info" not in record:
        return f"pip install 'drivetrain[{extra}]'"
    option = "-e " if record["dir_info"].get("editable") else ""
    folder = unquote(urlsplit(record["url"]).path)
    return f"pip install {option}'{folder}[{extra}]'"


# Code that needs Linux system calls is refused elsewhere, with a remedy.
#
# Planning, reading runs, submitting jobs and training in one process do not need Linux.


def require_linux(what: str, remedy: str) -> None:
    """Refuse `what` on systems without the calls that a supervisor needs to watch processes."""
    missing = [
        name
        for name, is_there in (
            ("pidfd_open", hasattr(os, "pidfd_open")),
            ("/proc", Path("/proc/self/stat").exists()),
        )
        if not is_there
    ]
    if missing:
        rule = f"needs Linux; this {platform.system()} has no {' and no '.join(missing)}"
        raise EnvironmentProblem([Problem(what, rule, remedy, has_value=False)])

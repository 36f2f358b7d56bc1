"""`drivetrain train`."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from drivetrain.cluster.environments import is_bare_rank
from drivetrain.launch.request import asked_target, read_command, read_request
from drivetrain.launch.target import options_text


def help_of_target(argv: Sequence[str]) -> str | None:
    """The flags of the target that is named; None when none is, or no help is asked for."""
    name = asked_target(argv)
    return None if name is None else options_text(name)


def run(argv: Sequence[str]) -> int:
    """Start the ranks and keep them going, or hand the run to a target; the exit code."""
    argv, plan, cluster = _without_plan(list(argv))
    if {"-h", "--help"} & set(argv) and asked_target(argv) is None:
        read_command(argv)  # says so if help is asked of us, and not of the script
    if plan is not None:
        argv = _planned(argv, plan, cluster)
    if is_bare_rank(os.environ):
        _become_the_script(argv)
    request = read_request(argv)
    if request is not None:
        from drivetrain.cli.jobs import submit

        return submit(request)
    from drivetrain.launch.guardian import guard

    return _leave(guard(argv))


def _leave(code: int) -> NoReturn:
    """At once: the run's last moment is written down, and what came after it would be nobody's."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _become_the_script(argv: Sequence[str]) -> None:
    """Under a launcher of an engine's own, which has started the ranks: this is one of them."""
    from drivetrain.launch.early import command_of_ranks

    os.execv(sys.executable, [sys.executable, *command_of_ranks(read_command(argv))])  # noqa: S606


def _without_plan(argv: list[str]) -> tuple[list[str], str | None, str]:
    """Take out `--plan auto|FILE` and its `--cluster NAME`, before or after the script."""
    if not any(word.partition("=")[0] == "--plan" for word in argv):
        return argv, None, ""  # a --cluster of the script's own stays
    found: dict[str, str] = {}
    rest: list[str] = []
    queue = iter(argv)
    for word in queue:
        flag, has_value, value = word.partition("=")
        if flag in ("--plan", "--cluster"):
            found[flag] = value if has_value else next(queue, "")
        else:
            rest.append(word)
    return rest, found.get("--plan"), found.get("--cluster", "cluster.yaml")


def _planned(argv: list[str], plan: str, cluster: str) -> list[str]:
    """The same words with what the plan chose; the ranks are told where it lies."""
    from drivetrain.plan.for_launch import plan_for_command, settings_of
    from drivetrain.train.watch.requested import PLAN_VARIABLE

    path = Path(plan)
    if plan == "auto":
        path = Path(tempfile.mkdtemp(prefix="drivetrain-plan-")) / "plan.json"
        plan_for_command(argv, cluster).write(path)
    os.environ[PLAN_VARIABLE] = str(path.resolve())
    return [*argv, *settings_of(path)]

"""`drivetrain train`."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from drivetrain.cli.say import say
from drivetrain.cluster.environments import is_bare_rank
from drivetrain.launch.command import note_on
from drivetrain.launch.request import asked_target, read_command, read_request
from drivetrain.launch.target import options_text


def help_of_target(argv: Sequence[str]) -> str | None:
    """Help for the flags of the target that argv names; None if it names none."""
    name = asked_target(argv)
    return None if name is None else options_text(name)


def run(argv: Sequence[str]) -> int:
    """Start and supervise the ranks, or submit the run to a target; return the exit code."""
    argv, plan, cluster = _without_plan(list(argv))
    if {"-h", "--help"} & set(argv) and asked_target(argv) is None:
        read_command(argv)  # raises HelpAsked if --help is ours and not the script's
    if plan is not None:
        argv = _planned(argv, plan, cluster)
    if is_bare_rank(os.environ):
        _become_the_script(argv)
    request = read_request(argv)
    if request is not None:
        from drivetrain.cli.jobs import submit

        say_passed(request.passed_flags, request.job.script)
        return submit(request)
    command = read_command(argv)
    say_passed(command.passed_flags, command.script)
    from drivetrain.launch.guardian import guard

    return _leave(guard(argv))


def say_passed(flags: Sequence[str], script: str) -> None:
    """Tell the user that the script gets flags which the launcher has as well."""
    if flags:
        say(note_on(flags, script), err=True)


def _leave(code: int) -> NoReturn:
    """Exit at once: the run's end is recorded, and time spent in cleanup would not be."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _become_the_script(argv: Sequence[str]) -> None:
    """Replace this process by the script: an engine's own launcher started it as a rank."""
    from drivetrain.launch.early import command_of_ranks

    os.execv(sys.executable, [sys.executable, *command_of_ranks(read_command(argv))])  # noqa: S606


def _without_plan(argv: list[str]) -> tuple[list[str], str | None, str]:
    """Take out `--plan auto|FILE` and its `--cluster NAME`, before or after the script."""
    if not any(word.partition("=")[0] == "--plan" for word in argv):
        return argv, None, ""  # without --plan, --cluster is an argument of the script
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
    """Add the plan's settings to argv; the environment tells the ranks where the plan is."""
    from drivetrain.plan.for_launch import plan_for_command, settings_of
    from drivetrain.train.watch.requested import PLAN_VARIABLE

    path = Path(plan)
    if plan == "auto":
        path = Path(tempfile.mkdtemp(prefix="drivetrain-plan-")) / "plan.json"
        plan_for_command(argv, cluster).write(path)
    os.environ[PLAN_VARIABLE] = str(path.resolve())
    return [*argv, *settings_of(path)]

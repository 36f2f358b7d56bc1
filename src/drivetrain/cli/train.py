"""`drivetrain train`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from drivetrain.launch.guardian import guard


def run(words: Sequence[str]) -> int:
    """Start the ranks and keep them going; the exit code."""
    words, plan, cluster = _without_plan(list(words))
    if plan is not None:
        words = _planned(words, plan, cluster)
    return guard(words)


def _without_plan(words: list[str]) -> tuple[list[str], str | None, str]:
    """Take out `--plan auto|FILE` and `--cluster NAME`, before or after the script."""
    found: dict[str, str] = {}
    rest: list[str] = []
    queue = iter(words)
    for word in queue:
        flag, has_value, value = word.partition("=")
        if flag in ("--plan", "--cluster"):
            found[flag] = value if has_value else next(queue, "")
        else:
            rest.append(word)
    return rest, found.get("--plan"), found.get("--cluster", "cluster.yaml")


def _planned(words: list[str], plan: str, cluster: str) -> list[str]:
    """The same words with what the plan chose; the ranks are told where it lies."""
    from drivetrain.plan.for_launch import PLAN_VARIABLE, WATCH, plan_for_command, settings_of

    path = Path(plan)
    if plan == "auto":
        path = Path(tempfile.mkdtemp(prefix="drivetrain-plan-")) / "plan.json"
        plan_for_command(words, cluster).write(path)
    hooks = filter(None, (os.environ.get("DRIVETRAIN_HOOKS"), WATCH))
    os.environ["DRIVETRAIN_HOOKS"] = ",".join(hooks)
    os.environ[PLAN_VARIABLE] = str(path.resolve())
    return [*words, *settings_of(path)]

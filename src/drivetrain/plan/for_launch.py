"""A plan for a command line: `drivetrain train --plan auto`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from drivetrain.cluster.file import load_cluster
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.plan.plan import Plan, make_plan
from drivetrain.plan.profile.profiling import Profiler
from drivetrain.plan.profile.sources import from_script
from drivetrain.plan.search import Question, proposed
from drivetrain.plan.show import show


def plan_for_command(argv: Sequence[str], said: str) -> Plan:
    """Plan for the script in `argv`, on the ranks that `argv` starts."""
    script = next((word for word in argv if word.endswith(".py")), None)
    if script is None:
        rule = "needs a script that calls Trainer.fit"
        raise ConfigError([Problem("--plan", rule, "give one", "auto")])
    cluster = load_cluster(said)
    nodes, per_node = _count(argv, "--nnodes"), _count(argv, "--nproc-per-node")
    cluster = replace(
        cluster,
        num_nodes=nodes or (1 if per_node else cluster.num_nodes),
        devices_per_node=per_node or cluster.devices_per_node,
    )
    own = [word for word in argv[list(argv).index(script) + 1 :] if "=" in word and word[0] != "-"]
    found = from_script(script, own)
    if found.resolved is None:
        raise AssertionError("a script has a config")
    config = found.resolved.config
    question = Question(
        config.global_batch_size,
        precisions=(config.precision.dtype,),
        strategies=proposed(needs_packages=False),
        configs_micro_batch_size=config.micro_batch_size,
    )
    plan = make_plan(Profiler(found.subject), cluster, question)
    show(plan, Console(file=sys.stderr, highlight=False, soft_wrap=True), top=3)
    if plan.best is None:
        raise ConfigError([Problem("--plan", "nothing fits", "use more devices", "auto")])
    return plan


def settings_of(path: Path) -> list[str]:
    """Return the best plan's settings as command-line arguments."""
    try:
        best = json.loads(path.read_text())["plans"][0]
    except (OSError, ValueError, LookupError) as error:
        rule = f"contains no plan ({type(error).__name__})"
        raise ConfigError(
            [Problem("--plan", rule, "use auto, or a plan.json", str(path))]
        ) from error
    return [f"{key}={value}" for key, value in best["settings"].items()]


def _count(argv: Sequence[str], flag: str) -> int | None:
    for index, word in enumerate(argv):
        name, has_value, value = word.partition("=")
        if name.replace("_", "-") == flag:
            text = value if has_value else argv[index + 1]
            return int(text) if text.isdigit() else None
    return None

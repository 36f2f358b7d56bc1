"""Sorts command-line arguments: the config's, the script's own, or another program's."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from drivetrain.config.keys import leaf_keys, nearest_key
from drivetrain.config.script_parser import is_parserless
from drivetrain.core.errors import Problem
from drivetrain.core.flags import AFTER_SCRIPT, ALIASES

_RUNS_OTHERS = {"pytest", "py.test", "unittest", "ipykernel_launcher", "colab_kernel_launcher"}
"""Programs whose command line is not meant for the code that they run."""
_RAY_WORKER = "ray/_private/workers/default_worker.py"
"""It runs one task after another, of a driver whose command line it does not have."""


def runs_own_command_line() -> bool:
    """False in a notebook, a test runner or a Ray worker: their command line is their own."""
    first = sys.argv[0] if sys.argv else ""
    program = Path(first)
    name = program.parent.name if program.name == "__main__.py" else program.name
    # `python -m unittest` sets sys.argv[0] to exactly that
    name = name.removesuffix(".py").rpartition(" ")[2]
    is_code_alone = first in ("", "-", "-c")
    is_notebook = not is_code_alone and not hasattr(sys.modules["__main__"], "__file__")
    is_sent = is_code_alone and "execnet" in sys.modules  # how pytest-xdist starts its workers
    return (
        not is_notebook
        and not is_sent
        and not program.match(_RAY_WORKER)
        and name not in _RUNS_OTHERS
    )


def argv_of_script() -> list[str]:
    """Return the arguments after the script's name; none in a notebook or a test runner."""
    return sys.argv[1:] if runs_own_command_line() else []


def with_engines_flags(words: Sequence[str]) -> list[str]:
    """Turn an engine's flags into config keys: `--deepspeed_config FILE`, `--deepspeed`.

    This holds for every strategy that takes its engine's own file, as `parallel.NAME.config`.
    """
    flags = {f"--{name}{end}": name for name in _engines() for end in ("", "_config")}
    said: list[str] = []
    queue = list(words)
    while queue:
        flag, has_value, value = (word := queue.pop(0)).partition("=")
        name = flags.get(flag)
        if name is None:
            said.append(word)
            continue
        wants_file = flag.endswith("_config") or bool(queue and queue[0].endswith(".json"))
        if wants_file and not has_value and queue:
            value = queue.pop(0)
        said.append(f"parallel.strategy={name}")
        said += [f"parallel.{name}.config={value}"] if value else []
    return said


def _engines() -> list[str]:
    parts = [key.split(".") for key in leaf_keys()]
    return [each[1] for each in parts if len(each) == 3 and each[0::2] == ["parallel", "config"]]


def own_flags(words: Sequence[str]) -> tuple[list[str], tuple[str, ...], list[Problem]]:
    """Return the config's arguments, the names of the script's own flags, and problems.

    Flags that would otherwise be silently ignored are refused: a launcher flag, a config key with
    dashes, --help, which the script's parser would already have handled, and every flag of a script
    that certainly reads none.
    """
    # the source is only read if there are flags at all: every rank comes by here as it starts
    reads_none = any(word.startswith("-") for word in words) and _reads_no_flags()
    ours: list[str] = []
    left: list[str] = []
    problems: list[Problem] = []
    is_after_flag = False
    for word in words:
        is_ours = word.split("=")[0] == "--config" or ours[-1:] == ["--config"]
        if is_ours or ("=" in word and not word.startswith("-")):
            ours.append(word)
            is_after_flag = False
        elif word.startswith("-"):
            problem = _refused(word) or (_unread(word) if reads_none else None)
            problems += [problem] if problem else []
            left += [] if problem else [word.partition("=")[0]]
            is_after_flag = True
        elif not is_after_flag:  # a flag's values belong to the flag
            ours.append(word)
    return ours, tuple(left), problems


def _is_of_launcher(flag: str) -> bool:
    """True for what torch.distributed.launch or an engine's launcher adds to every script."""
    name = flag.replace("_", "-").removesuffix("-config").lstrip("-")
    return name == "local-rank" or name in _engines()


def _reads_no_flags() -> bool:
    """True if the script that was started certainly has no parser."""
    script, running = sys.argv[0], getattr(sys.modules["__main__"], "__file__", None)
    if running is None or not script.endswith(".py"):
        return False
    is_itself = Path(running).resolve() == Path(script).resolve()
    has_hooks = "DRIVETRAIN_HOOKS" in os.environ  # code from elsewhere, which may read flags
    return is_itself and not has_hooks and is_parserless(script)


def _unread(word: str) -> Problem | None:
    flag, _, value = word.partition("=")
    if _is_of_launcher(flag):
        return None
    near = nearest_key(flag.lstrip("-").replace("-", "_"))
    meant = f"write {near}={value or '…'}" if near else "leave it out"
    remedy = f"{meant}, or read it in the script: parser.parse_known_args(), load_config(argv=rest)"
    return Problem(flag, "the script has no parser that reads it", remedy, has_value=False)


def _refused(word: str) -> Problem | None:
    flag = word.partition("=")[0]
    if flag in ("-h", "--help"):
        return Problem(
            word,
            "the script does not parse it",
            "`drivetrain config` lists all keys",
            has_value=False,
        )
    if flag.replace("_", "-") in AFTER_SCRIPT | ALIASES.keys():
        rule = "is a flag of the launcher, not of the script"
        remedy = f"write it before the script: `drivetrain train {word} …`"
        return Problem(word, rule, remedy, has_value=False)
    name = flag.lstrip("-").replace("-", "_")
    keys = [key for key in leaf_keys() if name in (key, key.rpartition(".")[2])]
    if not keys:
        return None
    remedy = (
        f"write {keys[0]}=value; if the flag is the script's own: "
        "args, rest = parser.parse_known_args() and load_config(argv=rest)"
    )
    return Problem(word, "is a config key, which takes no leading dashes", remedy, has_value=False)

"""Whose words a command line holds: the config's, the script's own, or another program's."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from drivetrain.config.keys import leaf_keys
from drivetrain.core.errors import Problem
from drivetrain.core.flags import AFTER_SCRIPT, ALIASES

_RUNS_OTHERS = {"pytest", "py.test", "unittest", "ipykernel_launcher", "colab_kernel_launcher"}
"""Programs whose command line is their own, not that of the code they run."""


def argv_of_script() -> list[str]:
    """The words after the script's name; none where a notebook or a test runner is the program."""
    first = sys.argv[0] if sys.argv else ""
    program = Path(first)
    name = program.parent.name if program.name == "__main__.py" else program.name
    # `python -m unittest` writes just that into its first word
    name = name.removesuffix(".py").rpartition(" ")[2]
    is_code_alone = first in ("", "-", "-c")
    is_notebook = not is_code_alone and not hasattr(sys.modules["__main__"], "__file__")
    return [] if is_notebook or name in _RUNS_OTHERS else sys.argv[1:]


def with_engines_flags(words: Sequence[str]) -> list[str]:
    """`--deepspeed_config FILE` and `--deepspeed`, as that engine's scripts know them, as keys.

    So for every strategy that takes its engine's own file, `parallel.NAME.config`.
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
    """The config's words, the names of flags that are the script's own, and what can be neither.

    A flag that means something here would be ignored in silence, so it is refused: one of the
    launcher's, a config key with dashes, and --help, which a parser would have answered by now.
    """
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
            problem = _refused(word)
            problems += [problem] if problem else []
            left += [] if problem else [word.partition("=")[0]]
            is_after_flag = True
        elif not is_after_flag:  # a flag's values are whose the flag is
            ours.append(word)
    return ours, tuple(left), problems


def _refused(word: str) -> Problem | None:
    flag = word.partition("=")[0]
    if flag in ("-h", "--help"):
        return Problem(
            word, "nobody answers it", "`drivetrain config` lists all keys", has_value=False
        )
    if flag.replace("_", "-") in AFTER_SCRIPT | ALIASES.keys():
        rule = "is a flag of the launcher, and stands after the script's own words"
        return Problem(word, rule, "write it before them", has_value=False)
    name = flag.lstrip("-").replace("-", "_")
    keys = [key for key in leaf_keys() if name in (key, key.rpartition(".")[2])]
    if not keys:
        return None
    remedy = (
        f"write {keys[0]}=value; if it is the script's own: args, rest = parser.parse_known_args() "
        "and load_config(argv=rest)"
    )
    return Problem(word, "is a config key, which has no dashes in front", remedy, has_value=False)

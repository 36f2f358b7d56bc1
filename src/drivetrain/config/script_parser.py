"""Whether a script has a parser of its own for its command line, judged by its source.

Only what is certain counts: source that cannot be read or followed proves nothing.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from drivetrain.core.errors import Problem
from drivetrain.core.source import NOT_PARSED, files_of, imports_in

_PARSERS = re.compile(
    r"\b(argv|orig_argv|cmdline|argparse|ArgumentParser|HfArgumentParser|parse_args|"
    r"parse_known_args|optparse|getopt|click|typer|fire|absl|docopt|hydra|tyro|tap|jsonargparse|"
    r"LightningCLI|from_cli|__import__|importlib|runpy|psutil)\b|(?<![.\w])(exec|eval)\("
)
"""Names in source that reads the command line, or that may run code which does."""
_TAKES_THE_REST = re.compile(r"\b(parse_known\w*|REMAINDER|nargs)\b")
_SILENT = frozenset(
    {
        *("drivetrain", "torch", "torchvision", "torchaudio", "numpy", "scipy", "pandas", "yaml"),
        *("transformers", "datasets", "tokenizers", "safetensors", "tqdm", "PIL", "sklearn"),
        *("matplotlib", "einops", "pyarrow", "h5py", "fsspec", "requests", "peft", "torchmetrics"),
    }
)
"""Libraries that read no command line when they are imported or called for training."""


def settings_problem(script: str, argv: Sequence[str]) -> Problem | None:
    """Return the problem of a script whose parser rejects `key=value` arguments, if it has one."""
    said = next((word for word in argv if _is_setting(word)), None)
    source = _source(Path(script))
    if said is None or source is None or _TAKES_THE_REST.search(source):
        return None
    if not _calls(source, "parse_args"):
        return None
    remedy = (
        "use args, rest = parser.parse_known_args() and load_config(argv=rest), "
        "as docs/config.md shows"
    )
    rule = f"its parser accepts no key=value arguments, such as {said}"
    return Problem("SCRIPT", rule, remedy, script)


def is_parserless(script: str) -> bool:
    """True if nothing in the script or in its own modules can read the command line."""
    waiting, seen = [Path(script).resolve()], set[Path]()
    while waiting:
        file = waiting.pop()
        if file in seen:
            continue
        seen.add(file)
        source = _source(file)
        if source is None or _PARSERS.search(source):
            return False
        for level, name in imports_in(ast.parse(source)):
            beside = file.parents[level - 1 : level] if level else [Path(script).resolve().parent]
            own = [*files_of(name, beside)]
            if not own and (level or not _is_silent(name)):
                return False
            waiting += own
    return True


def _is_setting(word: str) -> bool:
    return "=" in word and not word.startswith("-")


def _is_silent(name: str) -> bool:
    top = name.partition(".")[0]
    return top in _SILENT or top in sys.stdlib_module_names


def _source(file: Path) -> str | None:
    """The text of a Python file; None if it is none."""
    try:
        source = file.read_text(encoding="utf-8")
        ast.parse(source)
    except NOT_PARSED:
        return None
    return source


def _calls(source: str, method: str) -> bool:
    """True if the source calls this method with no arguments: it then reads the command line."""
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == method
        and not node.args
        for node in ast.walk(ast.parse(source))
    )

"""Whether a script uses Drivetrain, judged by its source.

A rank reports that it trains when it calls `Trainer.fit` or `prepare`. If it is killed before that,
while it imports or loads data, only the source can tell whether the script resumes.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from drivetrain.core.source import NOT_PARSED, files_of, imports_in

_INSTALLED = ("site-packages", "dist-packages", "/lib/python3", "/lib64/python3")


def imports_drivetrain(command: Sequence[str]) -> bool:
    """True if the script or `-m` module imports Drivetrain, itself or through modules of its own.

    Absolute imports of installed libraries are not followed: those read thousands of files.
    """
    is_module = command[0] == "-m"
    script = Path(command[0]).resolve()
    folder = Path.cwd() if is_module else script.parent
    own = [folder, *(Path(each) for each in sys.path if not _is_installed(each))]
    waiting = [script]
    package = command[1].partition(".")[0] if is_module else ""
    anywhere = [folder, *map(Path, sys.path)]
    if is_module:
        main = f"{command[1]}.__main__"
        waiting = [*files_of(main, anywhere)] or [*_own_by_hook(main)]
    seen: set[Path] = set()
    while waiting:
        file = waiting.pop()
        if file in seen:
            continue
        seen.add(file)
        for level, name in _imports(file):
            top = name.partition(".")[0]
            if not level and top == "drivetrain":
                return True
            # the package of an -m module may be installed
            roots = anywhere if top == package else own
            found = [*files_of(name, file.parents[level - 1 : level] if level else roots)]
            waiting += found if found or level else _own_by_hook(name)
    return False


def _is_installed(folder: str) -> bool:
    return any(part in folder for part in _INSTALLED)


def _imports(file: Path) -> Iterator[tuple[int, str]]:
    with contextlib.suppress(*NOT_PARSED):
        yield from imports_in(ast.parse(file.read_bytes()))


def _own_by_hook(name: str) -> Iterator[Path]:
    """Return the files of a module that only an import hook finds, as of some editable installs.

    Only the top-level name is looked up: for a module inside a package, Python would run the
    package. Hence a namespace package of several editable installs is not followed.
    """
    top, _, inner = name.partition(".")
    try:
        spec = importlib.util.find_spec(top)
    except Exception:  # hooks are other people's code
        return
    if spec is None or not spec.has_location or _is_installed(str(spec.origin)):
        return
    yield Path(str(spec.origin))
    if inner:
        yield from files_of(inner, map(Path, spec.submodule_search_locations or ()))

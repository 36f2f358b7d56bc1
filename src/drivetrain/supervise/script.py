"""Whether a script uses Drivetrain, judged by its source.

A rank reports that it trains when it calls `Trainer.fit` or `prepare`. If it is killed before that,
while it imports or loads data, only the source can tell whether the script resumes.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

_INSTALLED = ("site-packages", "dist-packages", "/lib/python3")


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
        waiting = list(_files(f"{command[1]}.__main__", anywhere))
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
            waiting += _files(name, file.parents[level - 1 : level] if level else roots)
    return False


def _is_installed(folder: str) -> bool:
    return any(part in folder for part in _INSTALLED)


def _imports(file: Path) -> Iterator[tuple[int, str]]:
    """Return all imports, also those in functions: (0 or the level of a relative one, name)."""
    try:
        nodes = list(ast.walk(ast.parse(file.read_bytes())))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        # it is not Python, will fail when it is run, or is too odd to judge
        return
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = [alias.name for alias in node.names]
            yield from ((node.level, f"{node.module}.{n}" if node.module else n) for n in names)


def _files(name: str, folders: Iterable[Path]) -> Iterator[Path]:
    """Return the files that importing `name` from `folders` would run, packages included."""
    parts = name.split(".")
    for folder in folders:
        for count in range(1, len(parts) + 1):
            path = folder.joinpath(*parts[:count])
            candidates = (path.with_name(f"{path.name}.py"), path / "__init__.py")
            yield from (each for each in candidates if each.is_file())

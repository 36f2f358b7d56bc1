"""What Python source imports, read from its text: nothing is executed."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

NOT_PARSED = (OSError, SyntaxError, ValueError, RecursionError, MemoryError)
"""What parsing a file may raise: it is not Python, cannot be read, or is too odd to judge."""


def imports_in(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield every import, also those in functions: (0 or the level of a relative one, name).

    `from x import y` is `x.y`: y may be a module of the package x. `files_of` finds x in any case.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = [alias.name for alias in node.names]
            yield from ((node.level, f"{node.module}.{n}" if node.module else n) for n in names)


def files_of(name: str, folders: Iterable[Path]) -> Iterator[Path]:
    """Yield the files that importing `name` from `folders` would run, packages included."""
    parts = name.split(".")
    for folder in folders:
        for count in range(1, len(parts) + 1):
            path = folder.joinpath(*parts[:count])
            candidates = (path.with_name(f"{path.name}.py"), path / "__init__.py")
            yield from (each for each in candidates if each.is_file())

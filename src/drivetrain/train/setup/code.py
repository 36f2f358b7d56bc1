"""What a run's contract says of code: the model's modules, and the script's own files.

Tensors alone do not tell a ReLU from a GELU, nor a dropout of 0.1 from one of 0.9.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from torch import nn

_MOST_MODULES = 200
_MOST_FILES = 100
_MOST_CHARACTERS = 100
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
_INSTALLED = frozenset({"site-packages", "dist-packages"})


def modules_of(model: nn.Module) -> dict[str, str]:
    """Return each module's class and settings, by name; of repeated blocks, the first.

    A module that differs from its namesake in the first block is named as well.
    """
    found: dict[str, str] = {}
    usual: dict[str, str] = {}
    for name, module in model.named_modules():
        what = _described(module, is_root=not name)
        among = ".".join("*" if part.isdigit() else part for part in name.split("."))
        if among not in usual or usual[among] != what:
            found[name or "model"] = what
        usual.setdefault(among, what)
    if len(found) <= _MOST_MODULES:
        return found
    rest = list(found.items())[_MOST_MODULES:]
    first = dict(list(found.items())[:_MOST_MODULES])
    return first | {f"{len(rest)} more": _digest(repr(rest).encode())}


def _described(module: nn.Module, *, is_root: bool) -> str:
    """Return what `print(model)` shows of one module; the root's class may be renamed."""
    try:
        settings = _ADDRESS.sub("0x", module.extra_repr())
    except Exception:
        settings = ""
    if len(settings) > _MOST_CHARACTERS:
        settings = f"{settings[:_MOST_CHARACTERS]}… {_digest(settings.encode())}"
    return f"{'' if is_root else type(module).__name__}({settings})"


def files_of_script() -> dict[str, str]:
    """Return digests of the script and of what it has imported from its folder, by path."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if script is None:  # a notebook
        return {}
    folder = Path(script).absolute().parent
    found: dict[str, str] = {}
    for path in _imported_from(folder):
        try:
            found[str(path.relative_to(folder))] = _digest(path.read_bytes())
        except OSError:
            continue
    return dict(sorted(found.items())[:_MOST_FILES])


def _imported_from(folder: Path) -> Iterator[Path]:
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or not file.endswith(".py"):
            continue
        path = Path(file).absolute()
        if path.is_relative_to(folder) and not _INSTALLED.intersection(path.parts):
            yield path


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=4).hexdigest()

"""Modules named in strings, for importlib or `python -m`, point down the layers like any import."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src/drivetrain"
SEAMS = {
    # where plugins are registered: what is built in is named as a plugin from outside would be
    "config/schema.py": "record",
    "core/traits.py": "strategies",
}


def _layers() -> list[str]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = settings["tool"]["importlinter"]["contracts"]
    found: list[str] = next(each["layers"] for each in contracts if each["type"] == "layers")
    return found


def _named_in_strings(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for found in re.finditer(r"^drivetrain\.(\w+)(?=[.:\w]*$)", node.value):
                yield found[1]


def _points_up(path: str, source: str) -> list[str]:
    layers = _layers()
    own = path.partition("/")[0]
    if own not in layers:
        return []
    return [
        name
        for name in _named_in_strings(source)
        if name in layers and layers.index(name) < layers.index(own) and SEAMS.get(path) != name
    ]


def test_no_string_names_a_module_of_a_higher_layer() -> None:
    found = {}
    for path in sorted(PACKAGE.glob("*/**/*.py")):
        inside = str(path.relative_to(PACKAGE))
        found[inside] = _points_up(inside, path.read_text())
    assert {path: names for path, names in found.items() if names} == {}


def test_a_string_that_points_up_is_found() -> None:
    assert _points_up("record/x.py", 'HOOK = "drivetrain.train.watch:Hook"') == ["train"]
    assert _points_up("train/x.py", 'import_module("drivetrain.record.x")') == []

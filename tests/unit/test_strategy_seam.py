"""A strategy owns everything that is said about it: nobody else names one."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from drivetrain.core.traits import STRATEGIES, all_traits

SOURCE = Path(__file__).parents[2] / "src" / "drivetrain"
NAMES = re.compile(r"ddp|fsdp|hsdp|deepspeed|horovod|local_?sgd|zero_stage", re.IGNORECASE)

ALLOWED = {
    "__init__.py": "the public names of the drop-in trainers",
    "train/doors/": "the drop-in trainers: the names they replace are their interface",
    "cluster/environments.py": "horovodrun is a launcher that ranks can be started by",
    "cluster/measured.py": "the key of a file that older versions have written",
    "doctor/": "versions and variables of libraries, whether a run uses them or not",
    "plan/probe.py": "what torch's fully_shard costs on this machine is measured",
    "plan/simulation/published.py": "a paper's title",
    "testing/ranks.py": "torch's own module, imported ahead",
    "verify/parity/layouts.py": "an example in a message",
    "verify/parity/tolerance.py": "an explanation in a certificate",
    "cli/commands/": "examples in help texts",
}
"""Where a name may stand, and why."""


def words_of(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Identifiers and string literals; docstrings and comments may explain by example."""
    explained = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) not in explained:
                yield line, node.value
        elif isinstance(node, ast.ImportFrom):
            yield line, node.module or ""
        else:
            for field in ("id", "attr", "name", "arg"):
                value = getattr(node, field, None)
                if isinstance(value, str):
                    yield line, value


def named_in(path: Path) -> list[str]:
    words = words_of(ast.parse(path.read_text()))
    return [f"{path.relative_to(SOURCE)}:{line}: {w}" for line, w in words if NAMES.search(w)]


def test_no_strategy_is_named_outside_its_own_folder() -> None:
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        where = str(path.relative_to(SOURCE))
        if not where.startswith(("strategies/", *ALLOWED)):
            found += named_in(path)
    assert not found, "ask the strategy's traits instead:\n" + "\n".join(found)


@pytest.mark.parametrize("place", ALLOWED)
def test_an_exception_is_one_only_as_long_as_it_is_needed(place: str) -> None:
    paths = [p for p in SOURCE.rglob("*.py") if str(p.relative_to(SOURCE)).startswith(place)]
    assert any(named_in(path) for path in paths)


COMMON = {"choose", "cost", "strategy"}
"""What everybody may import of strategies/: the interface."""


def test_no_strategys_own_classes_are_imported_elsewhere() -> None:
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        where = str(path.relative_to(SOURCE))
        if where.startswith(("strategies/", *ALLOWED)):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom):
                continue
            module = node.module or ""
            if module.startswith("drivetrain.strategies") and module.split(".")[-1] not in COMMON:
                found.append(f"{where}:{node.lineno}: {module}")
    assert not found


def test_a_word_is_found_wherever_it_stands(tmp_path: Path) -> None:
    lines = ('x = "use ddp"', "is_fsdp = 1", "f(zero_stage=2)", 'f"parallel.horovod.{x}"', "a.hsdp")
    for line in lines:
        assert any(NAMES.search(word) for _, word in words_of(ast.parse(line))), line
    explained = ast.parse('"""As ddp does."""\n# fsdp\nx = 1\n"""Of fsdp."""')
    assert not any(NAMES.search(word) for _, word in words_of(explained))


def test_every_strategy_is_whole() -> None:
    for traits in all_traits():
        assert STRATEGIES.references[traits.name].startswith("drivetrain.strategies.")
        assert traits.section()  # everything in it has a default

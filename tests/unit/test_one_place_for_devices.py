"""Only `parallel/accelerator.py` knows device types."""

from __future__ import annotations

import ast
from pathlib import Path

import drivetrain

SOURCE = Path(drivetrain.__file__).parent
HOME = SOURCE / "parallel/accelerator.py"
NOT_RUN_ON_DEVICES = ("doctor",)
"""It looks at versions and tools."""
TYPES = {"cuda", "xpu", "mps", "hip", "rocm", "npu", "hpu"}


def _compares_a_type(node: ast.AST) -> bool:
    """`x.type == "cuda"`, `device.type in (…)`; comparing with the CPU alone is what any may do."""
    if not isinstance(node, ast.Compare):
        return False
    constants = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant)]
    return any(value in TYPES for value in constants)


def _asks_torch(node: ast.AST) -> bool:
    """`torch.cuda.…`, `torch.xpu.…`."""
    return (
        isinstance(node, ast.Attribute)
        and node.attr in TYPES
        and isinstance(node.value, ast.Name)
        and node.value.id == "torch"
    )


ALLOWED = {
    # cuBLAS reads its workspace when CUDA begins: there is no other device's word for it
    "train/numerics/bitwise_mode.py": 1,
}


def test_no_other_file_compares_device_types() -> None:
    found: dict[str, list[int]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        if path == HOME or name.startswith(NOT_RUN_ON_DEVICES):
            continue
        tree = ast.parse(path.read_text())
        nodes = [n for n in ast.walk(tree) if isinstance(n, ast.expr)]
        lines = [n.lineno for n in nodes if _compares_a_type(n) or _asks_torch(n)]
        if lines:
            found[name] = lines
    assert {name: len(lines) for name, lines in found.items()} == ALLOWED, found

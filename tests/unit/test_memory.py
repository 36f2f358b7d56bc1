"""How much memory may be used here, and the refusal of more ranks than fit into it."""

from __future__ import annotations

from pathlib import Path

import pytest

from drivetrain.core import memory
from drivetrain.launch import early


@pytest.mark.parametrize(
    ("name", "text", "limit"),
    [
        ("memory.max", "1073741824\n", 2**30),
        ("memory.max", "max\n", None),
        ("memory/memory.limit_in_bytes", "1073741824\n", 2**30),
        ("memory/memory.limit_in_bytes", "9223372036854771712\n", None),  # how v1 says "no limit"
        ("memory.max", "", None),
    ],
)
def test_a_containers_limit_counts_if_it_is_one(
    tmp_path: Path, name: str, text: str, limit: int | None
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
    assert memory.limit_bytes(tmp_path) == limit
    assert memory.usable_bytes(tmp_path) == (limit or memory.machine_bytes())


def test_more_ranks_than_the_memory_holds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early, "usable_bytes", lambda: 2**30)
    assert early.too_many_for_memory(5, shares_imports=False) is None  # of 200 MiB
    problem = early.too_many_for_memory(6, shares_imports=False)
    assert problem is not None
    assert "1.0 GiB of memory can be used here" in str(problem)
    assert "--world-size 6" in str(problem)
    assert early.too_many_for_memory(6, shares_imports=True) is None

"""docs/gpu.md lists what only CUDA can reach; no file names CUDA unnoticed."""

from __future__ import annotations

from pathlib import Path

from tests.cuda_only import (
    BLOCK,
    PLACES,
    RUN_EVERYWHERE,
    files_that_name_cuda,
    refreshed,
    total,
)

PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"


def test_every_file_that_names_cuda_is_accounted_for() -> None:
    assert files_that_name_cuda() == {place.file for place in PLACES} | RUN_EVERYWHERE.keys()


def test_there_are_fewer_than_forty_statements() -> None:
    assert total() < 40


def test_the_page_has_the_list() -> None:
    page = PAGE.read_text()
    assert BLOCK.search(page)
    assert refreshed(page) == page, "python -m tests.cuda_only docs/gpu.md"

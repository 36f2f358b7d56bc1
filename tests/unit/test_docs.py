from __future__ import annotations

from pathlib import Path

from tests.console_blocks import BLOCK, output_of, refreshed

PAGE = Path(__file__).parents[2] / "docs" / "config.md"


def test_the_page_shows_what_the_commands_really_say() -> None:
    page = PAGE.read_text()
    assert len(BLOCK.findall(page)) >= 10
    assert refreshed(page) == page


def test_a_page_that_has_come_apart_is_noticed() -> None:
    page = "```console\n$ drivetrain config seed=x\nfine\n```\n"
    assert refreshed(page) != page
    assert "seed = x: must be a whole number" in output_of("drivetrain config seed=x")

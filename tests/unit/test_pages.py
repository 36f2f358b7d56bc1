"""The pages that the code writes are as it would write them today, and the nav has every page."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mkdocs.utils.yaml import yaml_load

from drivetrain import __version__
from tests.pages import DOCS, PAGES
from tests.pages.play import differences
from tests.pages.tables import PLACE, with_tables

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_says_what_the_code_does(name: str) -> None:
    assert (DOCS / name).read_text() == PAGES[name](), "make pages"


@pytest.mark.parametrize("path", sorted(DOCS.rglob("*.md")), ids=lambda path: path.name)
def test_its_tables_are_those_that_were_measured(path: Path) -> None:
    page = path.read_text()
    assert with_tables(page) == page, "make pages"
    assert page.count("<!-- table:") == len(PLACE.findall(page)), "one has no end"


def test_a_table_is_found_by_file_and_number(tmp_path: Path) -> None:
    (tmp_path / "table.md").write_text("Said.\n\n| a |\n| - |\n| 1 |\n\n| b |\n| - |\n| 2 |\n")
    begin, end = "<!-- table: table.md{} -->\n\n", "\n\n<!-- end of table -->"
    pages = [begin.format(number) + "| old |" + end for number in ("", " 2")]
    assert "| 1 |" in with_tables(pages[0], tmp_path)
    assert "| 2 |" in with_tables(pages[1], tmp_path)
    assert "old" not in with_tables("\n".join(pages), tmp_path)


def test_every_key_stands_on_the_page_once() -> None:
    from drivetrain.config.keys import leaf_keys

    page = (DOCS / "config-keys.md").read_text()
    assert [key for key in leaf_keys() if page.count(f"| `{key}` |") != 1] == []


def test_a_reader_is_sent_nowhere_else_for_fonts_or_scripts() -> None:
    site: dict[str, Any] = yaml_load((ROOT / "mkdocs.yml").read_text())
    assert site["theme"]["font"] is False
    assert not [each for each in site["extra_css"] if "://" in each]
    assert not site.get("extra_javascript")


def test_the_version_is_told_without_the_command_line_library() -> None:
    words = [sys.executable, "-X", "importtime", "-m", "drivetrain", "--version"]
    said = subprocess.check_output(words, stderr=subprocess.STDOUT, text=True)
    assert __version__ in said
    assert not re.search(r"\| +(typer|rich|torch|pydantic)$", said, re.MULTILINE)


def test_keys_are_readable_on_a_narrow_terminal() -> None:
    said = subprocess.check_output([sys.executable, "-m", "drivetrain", "config"], text=True)
    assert "global_batch_size = (required)\n    Samples per optimizer step over all ranks." in said


@pytest.mark.slow
@pytest.mark.long
def test_the_first_script_trains_the_same_on_two_processes(tmp_path: Path) -> None:
    code = re.search(r"```python title=\"first.py\"\n(.*?)```", _page("first-script.md"), re.DOTALL)
    assert code is not None
    (tmp_path / "first.py").write_text(code[1])
    launch = [sys.executable, "-m", "drivetrain", "train", "first.py", "--nproc-per-node", "2"]
    said = [
        subprocess.check_output(words, cwd=tmp_path, text=True).splitlines()
        for words in ([sys.executable, "first.py"], launch)
    ]
    assert said[0][-1] == said[1][-1]
    assert re.fullmatch(r"accuracy 0\.9\d\d", said[0][-1])


def test_a_tour_that_says_something_else_is_noticed() -> None:
    page = _page("tour.md")
    hashes = re.findall(r"[0-9a-f]{64}", page)
    assert len(hashes) == 2
    assert differences(page, page) == []
    assert "hashes differ" in differences(page, page.replace(hashes[0], "0" * 64, 1))[0]
    said = differences(page, page.replace("  certified", "  NOT certified"))[0]
    assert "'NOT certified'" in said
    assert "nobody said" in differences(page, page.replace("resumed: after", "began again"))[0]


def _page(name: str) -> str:
    return (DOCS / name).read_text()

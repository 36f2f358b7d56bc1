"""Hooks of MkDocs: llms.txt beside the site, and a name for the theme's search dialog.

llms.txt (https://llmstxt.org) has every page with its first sentence, by the nav; the pages'
Markdown is put beside their HTML, so that a program can read what a person reads.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

_FIRST_LINES: dict[str, str] = {}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    _FIRST_LINES[page.file.src_uri] = _first_sentence(markdown)
    return markdown


def on_nav(nav: Any, config: Any, **_: Any) -> Any:
    config["extra"]["whole_nav"] = nav
    return nav


def on_post_page(output: str, **_: Any) -> str:
    """A screen reader must be able to say what the dialog is."""
    return output.replace('role="dialog"', 'role="dialog" aria-label="Search"', 1)


def on_post_build(config: Any, **_: Any) -> None:
    site, docs = Path(config["site_dir"]), Path(config["docs_dir"])
    lines = [f"# {config['site_name']}", "", f"> {config['site_description']}", ""]
    for item in config["extra"].pop("whole_nav").items:
        lines += [f"## {item.title}", "", *_entries(item), ""]
    (site / "llms.txt").write_text("\n".join(lines))
    for name in _FIRST_LINES:
        copy = site / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(docs / name, copy)


def _entries(item: Any) -> list[str]:
    if item.children:
        return [line for child in item.children for line in _entries(child)]
    source = item.file.src_uri
    told = _FIRST_LINES[source]
    return [f"- [{item.title}]({source})" + (f": {told}" if told else "")]


def _first_sentence(markdown: str) -> str:
    """Of the first paragraph that is one; links and marks as plain words."""
    for block in re.sub(r"```.*?```", "", markdown, flags=re.DOTALL).split("\n\n"):
        if block.strip() and re.match(r"[*`\w\"]", block.strip()):
            plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(block.split()))
            return re.split(r"(?<=[.:])\s", plain.replace("**", ""))[0].rstrip(":")
    return ""

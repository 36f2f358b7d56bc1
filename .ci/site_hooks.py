"""Hooks of MkDocs: llms.txt beside the site, when figures were measured, a name for the search.

llms.txt (https://llmstxt.org) has every page with its first sentence, by the nav; the pages'
Markdown is put beside their HTML, so that a program can read what a person reads: with signatures
and docstrings, where mkdocstrings puts them into the HTML only.
"""

from __future__ import annotations

import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.figures import Figure, figures, has_history

_FIRST_LINES: dict[str, str] = {}
_FIGURES: list[Figure] = []


def on_pre_build(**_: Any) -> None:
    _FIGURES[:] = figures() if has_history() else []


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    _FIRST_LINES[page.file.src_uri] = _first_sentence(markdown)
    return markdown + _when_measured(f"docs/{page.file.src_uri}")


def _when_measured(page: str) -> str:
    """The commits that have the figures of a page; nothing where it has none."""
    shown = [figure for figure in _FIGURES if page in figure.pages]
    if not shown:
        return ""
    lines = [
        f"- `{each.name}`: commit `{each.commit}`, {each.date}; again by `make {each.target}`"
        + (f"; its code was changed in {each.num_changes} commits since" * bool(each.num_changes))
        for each in shown
    ]
    return (
        "\n\n---\n\nMeasured figures on this page (`benchmarks/results`):\n\n"
        + "\n".join(lines)
        + "\n"
    )


def on_nav(nav: Any, config: Any, **_: Any) -> Any:
    config["extra"]["whole_nav"] = nav
    return nav


def on_post_page(output: str, **_: Any) -> str:
    """A screen reader must be able to say what the dialog is, and keys to scroll a row of tabs."""
    output = output.replace('role="dialog"', 'role="dialog" aria-label="Search"', 1)
    return output.replace('<div class="tabbed-labels">', '<div class="tabbed-labels" tabindex="0">')


def on_post_build(config: Any, **_: Any) -> None:
    site, docs = Path(config["site_dir"]), Path(config["docs_dir"])
    lines = [f"# {config['site_name']}", "", f"> {config['site_description']}", ""]
    for item in config["extra"].pop("whole_nav").items:
        lines += [f"## {item.title}", "", *_entries(item), ""]
    (site / "llms.txt").write_text("\n".join(lines))
    for name in _FIRST_LINES:
        copy = site / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(readable((docs / name).read_text()))


_GENERATED = re.compile(r"^::: (\S+)$", re.MULTILINE)


def readable(markdown: str) -> str:
    """Put signatures and docstrings in the place of `::: drivetrain.name` lines."""
    if not _GENERATED.search(markdown):
        return markdown
    root = Path(__file__).parents[1]
    package = griffe.load("drivetrain", search_paths=[root / "src"])
    return _GENERATED.sub(partial(_described, package), markdown)


def _described(package: Any, found: re.Match[str]) -> str:
    """A name as a user imports it, its signature, its docstring, and a line for each member."""
    shown = package[found[1].removeprefix("drivetrain.")]
    path = f"drivetrain.{shown.name}" if shown.name in package.exports else found[1]
    members = [] if shown.is_function else shown.all_members.values()
    has_fields = shown.is_class and not shown.signature()  # else the signature has them
    lines = [
        f"- `{_signature(each)}`{_told(each)}"
        for each in members
        if not each.name.startswith("_")
        and (each.has_docstring or (has_fields and each.is_attribute))
    ]
    parts = [f"### {path}", f"```python\n{_signature(shown)}\n```", shown.docstring.value]
    return "\n\n".join([*parts, "\n".join(lines)]).rstrip()


def _signature(shown: Any) -> str:
    shown = shown.final_target if shown.is_alias else shown  # else without what it returns
    if shown.is_attribute:
        value = f" = {shown.value}" if "class-attribute" in shown.labels else ""
        return f"{shown.name}: {shown.annotation}" if shown.annotation else f"{shown.name}{value}"
    return shown.signature() or f"class {shown.name}"


def _told(shown: Any) -> str:
    if not shown.has_docstring:
        return ""
    return ": " + " ".join(shown.docstring.value.split("\n\n")[0].split())


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

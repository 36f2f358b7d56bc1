"""Pages that are generated from the code they describe.

`python -m tests.pages` (`make pages`) writes them; `tests/unit/test_pages.py` fails if a page
differs from the code.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.pages import commands, config_keys, exit_codes, widgets
from tests.pages.application_curves import expected_curves
from tests.pages.pictures import PICTURES

DOCS = Path(__file__).parents[2] / "docs"
PAGES: dict[str, Callable[[], str]] = {
    "cli.md": commands.page,
    "config-keys.md": config_keys.page,
    "exit-codes.md": exit_codes.page,
    "img/applications.svg": expected_curves,
    **{f"widgets/{name}.html": partial(widgets.page, name) for name in widgets.TITLES},
    **{f"img/lectures/{name}.svg": draw for name, draw in PICTURES.items()},
}

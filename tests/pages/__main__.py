from __future__ import annotations

from tests.pages import DOCS, PAGES

for name, page in PAGES.items():
    (DOCS / name).write_text(page())
    print(f"docs/{name}")

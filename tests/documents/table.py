"""`python -m tests.documents.table PAGE` writes the rows' tables into the page.

The page follows from the rows; `make documents` tests that the rows are true.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from tests.doctor.table import with_table
from tests.documents.row import Row
from tests.documents.rows import DOCUMENTS, ROWS

BEGIN, END = "<!-- rows -->", "<!-- end of rows -->"


def rendered() -> list[str]:
    """Return the lines of the tables, one table per document."""
    count = Counter(row.outcome for row in ROWS)
    said = ", ".join(f"{number} {outcome}" for outcome, number in count.most_common())
    lines = [f"{len(ROWS)} rows: {said}."]
    for title, rows in DOCUMENTS.items():
        lines += ["", f"## {title}", "", "| example | result | notes |", "| --- | --- | --- |"]
        lines += [_line(row) for row in rows]
    return lines


def _line(row: Row) -> str:
    printed, remark = (text.replace("|", "\\|") for text in (row.printed, row.remark))
    return f"| `{printed}` | {row.outcome} | {remark} |"


def page_with_rows(page: str) -> str:
    """Return the page with the rows' current tables."""
    return with_table(page, rendered(), BEGIN, END)


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.write_text(page_with_rows(target.read_text()))

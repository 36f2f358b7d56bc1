"""`python -m tests.documents.table PAGE`: what the field's documents print, and what happens here.

The page follows from the rows; that the rows are true, `make documents` shows.
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
    """The tables, one for each document."""
    count = Counter(row.outcome for row in ROWS)
    said = ", ".join(f"{number} {outcome}" for outcome, number in count.most_common())
    lines = [f"{len(ROWS)} rows: {said}."]
    for title, rows in DOCUMENTS.items():
        lines += ["", f"## {title}", "", "| printed | here | |", "| --- | --- | --- |"]
        lines += [_line(row) for row in rows]
    return lines


def _line(row: Row) -> str:
    printed, remark = (text.replace("|", "\\|") for text in (row.printed, row.remark))
    return f"| `{printed}` | {row.outcome} | {remark} |"


def page_with_rows(page: str) -> str:
    """The page as it should be."""
    return with_table(page, rendered(), BEGIN, END)


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.write_text(page_with_rows(target.read_text()))

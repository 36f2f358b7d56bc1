"""One check, in a process of its own: `python -m tests.gpu_smoke.check NAME ROWS`."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

from tests.gpu_smoke.catalogue import CHECKS
from tests.gpu_smoke.devices import is_cut
from tests.gpu_smoke.rows import FAIL, NOT_RUN, Row, append_row


def main(name: str, rows: Path) -> None:
    check = next(check for check in CHECKS if check.name == name)
    try:
        for row in check.rows():
            append_row(rows, row)
    except Exception as error:
        if is_cut():
            append_row(rows, Row("the rest", NOT_RUN, "the ten minutes are over"))
            return
        last = (str(error).strip().splitlines() or [""])[-1]
        words = f"{type(error).__name__}: {last}"
        text = f"```\n{traceback.format_exc()[-3000:]}\n```"
        append_row(rows, Row("the rest", FAIL, words, text))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

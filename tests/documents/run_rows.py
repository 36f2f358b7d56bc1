"""Run rows' snippets one after the other on the ranks that are there: run_rows.py FOLDER KEY…"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from pathlib import Path

from drivetrain.core.errors import DrivetrainError

PRELUDE = Path(__file__).parent / "prelude.py"


def outcome_of(code: str) -> tuple[str, str]:
    """What a snippet comes to, and what it said."""
    try:
        exec(compile(code, "snippet", "exec"), runpy.run_path(str(PRELUDE)))  # noqa: S102
    except DrivetrainError as error:
        return "refused", str(error)
    except Exception:
        return "failed", traceback.format_exc()
    return "works", ""


if __name__ == "__main__":
    from tests.documents.rows import ROWS

    folder, found = Path(sys.argv[1]).resolve(), {}
    target = folder / f"found-{os.environ.get('RANK', '0')}.json"
    for row in (row for row in ROWS if row.key in sys.argv[2:]):
        place = folder / row.key
        place.mkdir(exist_ok=True)
        os.chdir(place)
        found[row.key] = outcome_of(row.code)
        target.write_text(json.dumps(found))  # each time: should the next not end

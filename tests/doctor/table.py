"""`python -m tests.doctor.table PAGE`: plant every fault, and write what was said into a page.

The table stands between two comments of the page.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from tests.doctor.planted import FAULTS, FURTHER, findings_at, site

BEGIN, END = "<!-- planted faults -->", "<!-- end -->"


def rows() -> list[str]:
    lines = ["| planted | finding | evidence | fix |", "| --- | --- | --- | --- |"]
    with tempfile.TemporaryDirectory() as folder, site(Path(folder)) as place:
        clean = findings_at(place)
        lines.append(f"| nothing | {len(clean)} findings | | |")
        _say("nothing", clean == [])
    for fault in (*FAULTS, *FURTHER):
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder, site(Path(folder)) as place:
            fault.plant(place)
            found = findings_at(place)
        is_right = {each.check for each in found} == {fault.check} and fault.fix in found[0].fix
        _say(f"{fault.name} ({time.monotonic() - began:.1f} s)", is_right)
        for each in found[:1]:
            cells = (fault.name, f"{each.severity}: {each.what}", each.evidence, each.fix)
            shown = [
                cell.replace("|", "\\|")
                .replace(folder, "/shared")
                .replace(sys.executable, "python")
                for cell in cells
            ]
            lines.append(f"| {' | '.join(shown)} |")
        if not is_right:
            for each in found:
                sys.stderr.write(f"    {each}\n")
    return lines


def _say(name: str, is_right: bool) -> None:
    sys.stderr.write(f"{'ok ' if is_right else 'BAD'} {name}\n")


def with_table(page: str, table: list[str], begin: str = BEGIN, end: str = END) -> str:
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    return "\n".join([f"{before}{begin}", "", *table, "", f"{end}{after}"])


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.write_text(with_table(target.read_text(), rows()))

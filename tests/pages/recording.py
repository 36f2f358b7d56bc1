"""`python -m tests.pages.recording`: two real runs, one of them killed, as an animated picture.

What was typed and printed, with its times, goes to docs/img/kill.json; docs/img/kill.svg is drawn
from that (`--draw` only draws). Nothing is typed by hand: when the two hashes differ, there is no
picture.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RECORD, PICTURE = ROOT / "docs/img/kill.json", ROOT / "docs/img/kill.svg"
_SCRIPT = "examples/digits.py num_train_epochs=20"
_KILL_AFTER = 150  # steps
_LONGEST_WAIT_S = 0.6  # in the picture; a wait that was longer is cut to this
_SHOWN_STEPS = 1  # of a stretch of steps; the others are a line of dots
_COLUMNS, _LINE, _LETTER = 100, 19, 7.83

Line = dict[str, Any]  # at_s; kind: command, output or kill; text


def record() -> list[Line]:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "examples").symlink_to(ROOT / "examples")
        lines: list[Line] = []
        _train(folder, "calm", lines, kill=False)
        _train(folder, "killed", lines, kill=True)
        _run(folder, "sha256sum runs/*/checkpoints/weights.pt", lines)
    hashes = {line["text"].split()[0] for line in lines[-2:]}
    assert len(hashes) == 1, f"not the same weights: {hashes}"
    return lines


def _train(folder: str, name: str, lines: list[Line], *, kill: bool) -> None:
    words = f"drivetrain train --run-dir runs/{name} --nproc-per-node 2 {_SCRIPT}"
    lines.append(_line("command", words))
    run = subprocess.Popen(
        [sys.executable, "-m", *words.split()],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert run.stdout is not None
    for text in run.stdout:
        lines.append(_line("output", text.rstrip()))
        step = re.match(r"step (\d+)/", text)
        if kill and step and int(step[1]) >= _KILL_AFTER:
            kill = False
            rank = _ranks(run.pid)[0]
            lines.append(_line("kill", f"kill -9 {rank}"))
            os.kill(rank, signal.SIGKILL)
    assert run.wait() == 0
    assert not kill, "the run was over before the kill"


def _run(folder: str, command: str, lines: list[Line]) -> None:
    lines.append(_line("command", command))
    printed = subprocess.check_output(["bash", "-c", command], cwd=folder, text=True)
    lines += [_line("output", text) for text in printed.splitlines()]


def _line(kind: str, text: str) -> Line:
    return {"at_s": round(time.time(), 2), "kind": kind, "text": text}


def _ranks(launcher: int) -> list[int]:
    """The ranks' processes among the launcher's descendants, oldest first."""
    table = subprocess.check_output(["ps", "-eo", "pid=,ppid=,args="], text=True)
    rows = [line.split(None, 2) for line in table.splitlines()]
    family, found = {launcher}, []
    for pid, parent, args in sorted(rows, key=lambda row: int(row[0])):
        if int(parent) in family:
            family.add(int(pid))
            if "supervise.processes.worker" in args:
                found.append(int(pid))
    return found


def shortened(lines: list[Line]) -> list[Line]:
    """Stretches of steps as their first lines and dots; waits no longer than a reader's."""
    shown: list[Line] = []
    steps = 0
    for line in lines:
        steps = steps + 1 if line["text"].startswith("step ") else 0
        if steps <= _SHOWN_STEPS:
            shown.append(dict(line))
        elif steps == _SHOWN_STEPS + 1:
            shown.append({**line, "text": "…"})
        elif re.match(r"step (\d+)/\1 ", line["text"]):  # the last one
            shown.append(dict(line))
    at = before = shown[0]["at_s"]
    for line in shown:
        at += min(line["at_s"] - before, _LONGEST_WAIT_S)
        before, line["at_s"] = line["at_s"], at
    for line in shown[1:]:
        line["at_s"] -= shown[0]["at_s"]
    shown[0]["at_s"] = 0.0
    return shown


def drawn(lines: list[Line]) -> str:
    rows, delays = [], []
    for number, line in enumerate(lines):
        text = line["text"]
        text = text if len(text) <= _COLUMNS else text[: _COLUMNS - 1] + "…"
        before = {"command": "$ ", "kill": "another terminal $ ", "output": ""}[line["kind"]]
        kind = "hash" if re.match(r"[0-9a-f]{64} ", text) else line["kind"]
        y = 52 + number * _LINE
        rows.append(
            f'<text id="l{number}" class="{kind}" x="18" y="{y}">{escape(before + text)}</text>'
        )
        delays.append(f"#l{number}{{animation-delay:{line['at_s'] + number * 0.05:.2f}s}}")
    width, height = int(_COLUMNS * _LETTER) + 36, 52 + len(lines) * _LINE + 8
    return _SVG.format(width=width, height=height, delays="".join(delays), rows="\n".join(rows))


_SVG = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">
<title>A run is killed with kill -9, resumes, and ends with the same weights</title>
<style>
text{{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;
fill:#c9d6d3;white-space:pre;animation:shown .01s steps(1) both}}
@keyframes shown{{from{{opacity:0}}to{{opacity:1}}}}
@media (prefers-reduced-motion:reduce){{text{{animation:none}}}}
.command{{fill:#fff;font-weight:600}} .kill{{fill:#ff9d8a;font-weight:600}}
.hash{{fill:#6fe3c4;font-weight:600}}
{delays}
</style>
<rect width="{width}" height="{height}" rx="8" fill="#12211e"/>
<circle cx="20" cy="18" r="5" fill="#4a5d59"/><circle cx="38" cy="18" r="5" fill="#4a5d59"/>
<circle cx="56" cy="18" r="5" fill="#4a5d59"/>
{rows}
</svg>
"""

if __name__ == "__main__":
    if "--draw" not in sys.argv[1:]:
        RECORD.write_text(json.dumps(record(), indent=0) + "\n")
    PICTURE.write_text(drawn(shortened(json.loads(RECORD.read_text()))))

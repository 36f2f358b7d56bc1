"""What a Python traceback says in one line."""

from __future__ import annotations

_FRAME = '  File "'


def exception_line(text: str) -> str:
    """The exception and the first line of its message; whatever comes last, without a traceback.

    Of a chain it is the last one's. A message that quotes another process's traceback (a data
    worker's) ends with that one's exception, which says more.
    """
    lines = text.strip("\n").splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith(_FRAME)]
    if frames:
        for line in lines[frames[-1] + 1 :]:
            if line and not line.startswith(" "):  # below a frame: its source, marked and indented
                return line.strip()
    return lines[-1].strip() if lines else ""

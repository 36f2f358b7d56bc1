"""Text for terminals: readable quantities, and untrusted text made safe."""

from __future__ import annotations

import re

# Untrusted text, made safe for a terminal.
#
# A terminal obeys control characters: they clear it, name its window, move the cursor to overwrite
# text, or reverse a word so that it reads as another. In a run's directory they may be in any text.

_STEERING = r"\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069"
_ANY = re.compile(f"[{_STEERING}]")
_BUT_COLOURS = re.compile(rf"(\x1b\[[0-9;]{{0,40}}m|\r)|[{_STEERING}]")
_SHOWN = "\ufffd"


def plain(text: str) -> str:
    """Replace all control characters except newlines and tabs."""
    return _ANY.sub(_SHOWN, text) if not text.isprintable() else text


def plain_but_coloured(text: str) -> str:
    """Like `plain`, but keep colours and carriage returns; for the output of a run."""
    return _BUT_COLOURS.sub(lambda found: found[1] or _SHOWN, text)


# Readable quantities.


def counted(number: int, noun: str) -> str:
    """3, 'rank' → '3 ranks'; 1, 'rank' → '1 rank'; 2, 'process' → '2 processes'."""
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def readable_bytes(num_bytes: float) -> str:
    """1536 → '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(num_bytes) < 1024 or unit == "TiB":
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    raise AssertionError("unreachable")


def readable_duration(seconds: float) -> str:
    """75 → '1:15', 3725 → '1:02:05'; 3.25 → '3.2 s'."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, secs = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{secs:02d}" if hours else f"{minutes}:{secs:02d}"


def readable_rate(per_second: float) -> str:
    """12345.6 → '12.3k'."""
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if per_second >= size:
            return f"{per_second / size:.1f}{suffix}"
    return f"{per_second:.1f}"

"""Quantities as people read them."""

from __future__ import annotations


def readable_bytes(num_bytes: float) -> str:
    """1536 → '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(num_bytes) < 1024 or unit == "TiB":
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    raise AssertionError("unreachable")


def readable_duration(seconds: float) -> str:
    """75 → '1:15', 3725 → '1:02:05'; under ten seconds with a decimal."""
    if seconds < 10:
        return f"{seconds:.1f}s"
    minutes, secs = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{secs:02d}" if hours else f"{minutes}:{secs:02d}"


def readable_rate(per_second: float) -> str:
    """12345.6 → '12.3k'."""
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if per_second >= size:
            return f"{per_second / size:.1f}{suffix}"
    return f"{per_second:.1f}"

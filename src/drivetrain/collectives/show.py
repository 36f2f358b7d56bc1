"""Present rows as nccl-tests' table, as JSON and as a plot. Without torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from drivetrain.collectives.request import PLACEMENTS, CallTimes, Measured, RankSet, Row
from drivetrain.core.requirements import require

_OURS = ("p50", "p99", "slowest")
_NOTHING = "N/A"


def heading(ranks: RankSet, has_line_rate: bool, operation: str) -> Iterator[str]:
    """Yield nccl-tests' three header lines, with our columns to the right."""
    groups = len(ranks.groups)
    number = f"{ranks.num_ranks} ranks" if groups == 1 else f"{groups} groups of {ranks.num_ranks}"
    yield f"# {operation}: {ranks.name}, {number}"
    ours = [*_OURS, *_OURS, *(["line"] if has_line_rate else [])]
    units = ["(us)", "(us)", "(rank)"] * 2 + (["(%)"] if has_line_rate else [])
    blank = ["", "", "", "", ""]
    yield (
        _five("# ", *blank)
        + f"{'out-of-place':>27}{'in-place':>31}"
        + (f"{'out-of-place':>30}{'in-place':>28}")
    )
    four, four_units = ["time", "algbw", "busbw", "#wrong"], ["(us)", "(GB/s)", "(GB/s)", ""]
    yield _five("# ", "size", "count", "type", "redop", "root") + _right(four * 2, ours)
    yield _five("# ", "(B)", "(elements)", "", "", "") + _right(four_units * 2, units)


def line(row: Row, line_rate: float | None, rings: int) -> str:
    """Return one row; `rings`: groups that share the link of the line rate, 0: none uses it."""
    both = [getattr(row, placement) for placement in PLACEMENTS]
    four = [text for times in both for text in _figures(row, times)]
    ours = [text for times in both for text in _spread(times)]
    if line_rate is not None:
        ours.append(_NOTHING if not rings else f"{100 * part_of_line(row, line_rate, rings):.1f}")
    first = (str(row.num_bytes), str(row.count), row.dtype, row.redop, str(row.root))
    return _five("  ", *first) + _right(four, ours)


def part_of_line(row: Row, line_rate: float, rings: int) -> float:
    return rings * row.busbw(row.timed) / line_rate


def _five(mark: str, *words: str) -> str:
    size, count, dtype, redop, root = words
    return f"{mark}{size:>10}  {count:>12}  {dtype:>8}  {redop:>6}  {root:>6}"


def _right(four: Sequence[str], ours: Sequence[str]) -> str:
    """Format nccl-tests' columns in its widths, ours as wide as a time, or rank and ratio."""
    widths = (7, 6, 6, 6) * 2
    theirs = "".join(f"  {text:>{width}}" for text, width in zip(four, widths, strict=True))
    own = "".join(
        f"  {text:>{width}}" for text, width in zip(ours, (7, 7, 10, 7, 7, 10, 6), strict=False)
    )
    return theirs + own


def _figures(row: Row, times: CallTimes | None) -> list[str]:
    if times is None:
        return [_NOTHING] * 4
    if not row.num_bytes:
        return [_number(times.time_s * 1e6, 7), _NOTHING, _NOTHING, _NOTHING]
    wrong = _NOTHING if times.wrong is None else str(times.wrong)
    rates = (_number(each(times) / 1e9, 6) for each in (row.algbw, row.busbw))
    return [_number(times.time_s * 1e6, 7), *rates, wrong]


def _spread(times: CallTimes | None) -> list[str]:
    if times is None:
        return [_NOTHING] * 3
    slowest = f"{times.slowest_rank} ({times.slowest_s / times.time_s:.2f}x)"
    return [_number(times.p50_s * 1e6, 7), _number(times.p99_s * 1e6, 7), slowest]


def _number(value: float, width: int) -> str:
    """Format with as many decimals as fit, at most two."""
    decimals = max(0, min(2, width - 1 - len(str(int(value)))))
    return f"{value:.{decimals}f}"


def summary(sets: Sequence[Measured]) -> Iterator[str]:
    """Yield nccl-tests' last lines, and the fitted model."""
    rows = [row for each in sets for row in each.rows]
    wrong = sum(row.wrong for row in rows)
    rates = [row.busbw(row.timed) / 1e9 for row in rows if row.num_bytes]
    yield f"# {'Out of bounds values':<20} : {wrong} {'FAILED' if wrong else 'OK'}"
    if rates:
        yield f"# {'Avg bus bandwidth':<20} : {sum(rates) / len(rates):g}"
    fits = [(each, one) for each in sets for one in each.fits()]
    if fits:
        yield "#"
        yield "# fitted: seconds = hops x latency + size x (busbw / algbw) / rate"
        titles = ("rate (GB/s)", "latency (us)", "median error")
        yield f"# {'':16} {'':16} " + " ".join(f"{title:>12}" for title in titles)
    for each, one in fits:
        error = one.error(each.seconds()[one.kind])
        yield (
            f"# {each.ranks.name:16} {one.kind:16} {one.bytes_per_s / 1e9:>12.3f}"
            f" {one.latency_s * 1e6:>12.1f} {error:>12.0%}"
        )


def to_dict(sets: Sequence[Measured]) -> list[dict[str, Any]]:
    """Return the rows for JSON; names give the units."""
    return [
        {
            "name": each.ranks.name,
            "groups": each.ranks.groups,
            "rows": [row.to_dict() for row in each.rows],
            "fits": [
                {
                    "operation": one.kind,
                    "gb_per_s": one.bytes_per_s / 1e9,
                    "latency_us": one.latency_s * 1e6,
                    "median_error": one.error(each.seconds()[one.kind]),
                }
                for one in each.fits()
            ],
        }
        for each in sets
    ]


def plot(sets: Sequence[Measured], title: str, line_rate: float | None, path: Path) -> None:
    """Plot time and bus bandwidth by size, one row of plots per set; dashed: the fitted model."""
    require("matplotlib", extra="plan")
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, all_axes = pyplot.subplots(
        len(sets), 2, figsize=(13, 1 + 4 * len(sets)), squeeze=False, sharex=True
    )
    for each, (left, right) in zip(sets, all_axes, strict=True):
        _curves(each, left, right)
        if line_rate is not None:
            right.axhline(line_rate / 1e9, color="black", linestyle=":", label="line rate")
        left.set_title(f"{each.ranks.name}, {each.ranks.num_ranks} ranks", fontsize=10)
        left.set_ylabel("µs, median call")
        right.set_ylabel("busbw, GB/s")
        right.legend(fontsize=8)
    for axes in all_axes[-1]:
        axes.set_xlabel("bytes")
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _curves(measured: Measured, left: Any, right: Any) -> None:
    fits = {one.kind: one for one in measured.fits()}
    for index, (operation, seconds) in enumerate(measured.seconds().items()):
        colour = f"C{index}"
        rows = [row for row in measured.rows if row.operation == operation]
        microseconds = [s * 1e6 for s in seconds.values()]
        left.loglog(list(seconds), microseconds, "o-", ms=3, color=colour)
        rates = [row.busbw(row.timed) / 1e9 for row in rows]
        right.loglog(
            [row.num_bytes for row in rows], rates, "o-", ms=3, color=colour, label=operation
        )
        if operation in fits:
            fitted = [fits[operation].seconds(size) * 1e6 for size in seconds]
            left.loglog(list(seconds), fitted, "--", lw=0.8, color=colour)


def as_typed(path: Path) -> Path:
    """Return a path relative to the working directory if it is below it."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def say(text: str) -> None:
    """Print a line and flush."""
    sys.stdout.write(text.rstrip() + "\n")
    sys.stdout.flush()

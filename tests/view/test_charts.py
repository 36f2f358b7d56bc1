from __future__ import annotations

import re
from xml.etree import ElementTree

import numpy as np
import pytest

from drivetrain.view.charts import (
    NUM_SHADES,
    ChartLine,
    Curve,
    curve,
    heat,
    ledger_bar,
    ledger_over_time,
    ledger_table,
    shades_for,
    timeline,
)
from drivetrain.view.run_view import RankGrid
from drivetrain.view.series import make_series
from tests.view.runs import HOSTILE, attempt, grid, ledger, run_view


def parsed(fragment: str) -> ElementTree.Element:
    return ElementTree.fromstring(f"<all>{fragment}</all>")  # noqa: S314 - our own


def points(fragment: str, css: str = "line line-1") -> list[tuple[float, float]]:
    path = next(p for p in parsed(fragment).iter("path") if p.get("class") == css)
    return [
        (float(x), float(y))
        for x, y in re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", path.get("d") or "")
    ]


def test_a_curve_spans_its_axes_and_keeps_its_shape() -> None:
    series = make_series("loss", [0, 50, 100], [1.0, 3.0, 2.0])
    drawn = points(curve(Curve("loss", [ChartLine(series)])))
    assert [x for x, _ in drawn] == [0, 500, 1000]
    highest, lowest = drawn[1][1], drawn[0][1]
    assert 0 <= highest < drawn[2][1] < lowest <= 1000
    # half-way between the two others, as 2 is between 1 and 3
    assert drawn[2][1] == pytest.approx((highest + lowest) / 2, abs=0.2)


def test_two_lines_share_their_axes() -> None:
    low = make_series("loss", [0, 100], [0.0, 0.0])
    high = make_series("loss", [0, 50], [10.0, 10.0])
    drawn = curve(Curve("loss", [ChartLine(low), ChartLine(high, "line-2")]))
    assert points(drawn, "line line-2")[1][0] == 500
    assert points(drawn, "line line-2")[0][1] < points(drawn)[0][1]


def test_a_curve_breaks_and_is_marked_where_there_is_no_number() -> None:
    series = make_series("loss", [0, 1, 2, 3, 4], [1.0, 2.0, np.nan, 2.0, 1.0])
    drawn = curve(Curve("loss", [ChartLine(series)]))
    assert "step 2: not a finite number" in drawn
    path = next(p for p in parsed(drawn).iter("path") if p.get("class") == "line line-1")
    assert (path.get("d") or "").count("M") == 2


@pytest.mark.parametrize("values", [[], [1.0], [np.nan, np.nan], [5.0, 5.0, 5.0], [np.inf, 1.0]])
def test_a_curve_of_little_is_still_a_chart(values: list[float]) -> None:
    series = make_series("loss", range(len(values)), values)
    drawn = curve(Curve("loss", [ChartLine(series)]))
    assert "NaN" not in drawn
    assert "nan" not in drawn
    parsed(drawn)


def test_the_ledgers_bar_is_as_long_as_its_parts() -> None:
    drawn = ledger_bar(ledger(productive=75.0, idle=25.0))
    widths = [float(r.get("width") or 0) for r in parsed(drawn).iter("rect")]
    assert widths == [750, 250]
    assert [r.get("class") for r in parsed(drawn).iter("rect")] == ["is-productive", "is-idle"]


def test_every_class_is_said_in_words_beside_its_colour() -> None:
    table = ledger_table(ledger(productive=75.0, data_wait=25.0))
    assert "data wait" in table
    assert "25.0%" in table
    assert "1 min 40 s" in table


def test_each_column_over_time_is_filled_to_the_top() -> None:
    drawn = parsed(ledger_over_time(ledger(productive=60.0, recovery=20.0, idle=20.0)))
    heights: dict[str, float] = {}
    for rect in drawn.iter("rect"):
        left = rect.get("x") or ""
        heights[left] = heights.get(left, 0.0) + float(rect.get("height") or 0)
    assert len(heights) == 4
    assert all(height == pytest.approx(1000, abs=1) for height in heights.values())


def test_every_attempt_is_drawn_where_it_was() -> None:
    lives = [attempt(n, 1000.0 + 10 * n, 1010.0 + 10 * n, kind="failed") for n in range(30)]
    run = run_view(attempts=lives, start_s=1000.0, end_s=1300.0)
    bars = [r for r in parsed(timeline(run)).iter("rect") if r.get("class") == "attempt"]
    assert len(bars) == 30
    assert [float(b.get("x") or -1) for b in bars] == pytest.approx(
        [1000 * n / 30 for n in range(30)], abs=0.1
    )
    ends = [r for r in parsed(timeline(run)).iter("rect") if r.get("class") == "is-bad"]
    assert len(ends) == 30


def test_checkpoints_are_ticks_on_their_attempt() -> None:
    saves = [p for p in parsed(timeline(run_view())).iter("path") if p.get("class") == "save"]
    assert [(p.get("d") or "").count("M") for p in saves] == [1, 0]


def area_by_shade(fragment: str) -> dict[int, int]:
    found = {}
    for path in parsed(fragment).iter("path"):
        area = 0
        for left, top, right, bottom in re.findall(
            r"M(\d+) (\d+)H(\d+)V(\d+)H\d+z", path.get("d") or ""
        ):
            area += (int(right) - int(left)) * (int(bottom) - int(top))
        found[int((path.get("class") or "").removeprefix("shade-"))] = area
    return found


def test_a_heat_map_covers_everything_once_and_shows_the_slow_rank() -> None:
    given = grid(10, 20)
    slow = given.seconds["compute"].copy()
    slow[3, 10:] = 0.4
    shown = RankGrid(given.rank_edges, given.step_edges, {"compute": slow})
    areas = area_by_shade(heat(shown, "compute"))
    assert sum(areas.values()) == 1_000_000
    assert areas[NUM_SHADES - 1] == 50_000  # one of ten ranks, half of its steps


def test_a_rank_without_steps_is_left_empty() -> None:
    given = grid(4, 4)
    values = given.seconds["compute"].copy()
    values[2, :] = np.nan
    areas = area_by_shade(
        heat(RankGrid(given.rank_edges, given.step_edges, {"compute": values}), "compute")
    )
    assert sum(areas.values()) == 750_000


def test_noise_of_a_per_cent_is_not_made_to_look_like_a_difference() -> None:
    noise = np.random.default_rng(0).normal(0.2, 0.0005, (8, 50)).astype(np.float32)
    shades = shades_for("compute", noise)
    assert np.unique(shades.of(noise)).size <= 2


@pytest.mark.parametrize("num_ranks", [4, 4096])
def test_a_page_of_heat_stays_small(num_ranks: int) -> None:
    from drivetrain.view.builders import GridBuilder
    from tests.view.tables import table

    builder = GridBuilder(range(num_ranks))
    random = np.random.default_rng(0)
    for row in range(num_ranks):
        builder.take(row, table(random.normal(0.2, 0.05, 200)))
    made = builder.grid()
    assert made is not None
    assert len(heat(made, "compute")) < 200_000


def test_hostile_words_stay_words() -> None:
    run = run_view(
        attempts=[attempt(1, 1000.0, 1060.0, what=HOSTILE, kind=HOSTILE)],
    )
    series = make_series(HOSTILE, [0, 1], [1.0, 2.0])
    for drawn in (
        timeline(run),
        curve(Curve(HOSTILE, [ChartLine(series)], marks=[(0.5, HOSTILE)])),
    ):
        assert "<script" not in drawn
        assert "<img" not in drawn
        parsed(drawn)

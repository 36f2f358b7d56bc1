from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from drivetrain.view.series import (
    Scale,
    duration_text,
    duration_ticks,
    make_series,
    number_text,
    smoothed,
    step_ticks,
    thinned,
    ticks,
    value_scale,
)


def test_a_step_done_twice_counts_once_with_its_last_value() -> None:
    series = make_series("x", [1, 2, 3, 2, 3, 4], [1.0, 2.0, 3.0, 20.0, 30.0, 40.0])
    assert series.steps.tolist() == [1, 2, 3, 4]
    assert series.values.tolist() == [1.0, 20.0, 30.0, 40.0]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), size=st.integers(1, 20_000), columns=st.integers(1, 300))
def test_thinning_keeps_every_columns_extremes_and_ends(seed: int, size: int, columns: int) -> None:
    values = np.random.default_rng(seed).standard_normal(size)
    series = make_series("x", np.arange(size), values)
    kept = thinned(series, columns)
    assert kept.steps.size <= max(4 * columns, min(size, 4 * columns))
    assert kept.values[0] == values[0]
    assert kept.values[-1] == values[-1]
    place = np.minimum(np.arange(size) * columns // max(1, size - 1), columns - 1)
    for column in range(0, columns, max(1, columns // 10)):
        inside = values[place == column]
        drawn = kept.values[np.isin(kept.steps, np.flatnonzero(place == column))]
        if inside.size:
            assert drawn.min() == inside.min()
            assert drawn.max() == inside.max()


def test_a_single_spike_in_a_million_points_survives() -> None:
    values = np.ones(1_000_000)
    values[123_456] = 9.0
    assert thinned(make_series("x", np.arange(values.size), values), 600).values.max() == 9.0


def test_what_is_not_a_number_survives_thinning() -> None:
    values = np.ones(50_000)
    values[40_000] = np.nan
    series = make_series("x", np.arange(values.size), values)
    assert thinned(series, 100).broken_steps.tolist() == [40_000]
    assert series.finite.values.size == 49_999


def test_the_trend_is_the_mean_behind_the_noise() -> None:
    noise = np.random.default_rng(0).standard_normal(5000)
    trend = smoothed(make_series("x", np.arange(5000), 3.0 + noise))
    assert trend.values.size <= 400
    assert np.abs(trend.values[50:] - 3.0).max() < 0.5


@settings(max_examples=80, deadline=None)
@given(
    low=st.floats(-1e6, 1e6),
    span=st.floats(1e-6, 1e7),
    count=st.integers(2, 8),
)
@example(low=879609.9999999999, span=1e-06, count=4)
def test_ticks_are_round_inside_and_about_as_many_as_asked(
    low: float, span: float, count: int
) -> None:
    scale = Scale(low, low + span)
    found = ticks(scale, count)
    assert len(found) <= count * 4 / 3 + 1
    assert count < 4 or len(found) >= 2
    # a tick is a double: far from zero, the nearest one may be outside a short span
    slack = 1e-6 + 2 * math.ulp(max(abs(scale.low), abs(scale.high))) / span
    assert all(-slack <= scale.place(tick) <= 1 + slack for tick in found)


def test_steps_have_no_halves() -> None:
    assert step_ticks(Scale(1, 3), 5) == [1, 2, 3]


def test_hours_are_cut_at_hours() -> None:
    assert duration_ticks(Scale(0, 6 * 3600), 5) == [0, 7200, 14400, 21600]


def test_a_wide_span_is_drawn_by_powers_of_ten() -> None:
    assert value_scale(np.array([0.001, 10.0])).is_log
    assert not value_scale(np.array([1.0, 10.0])).is_log
    assert not value_scale(np.array([-1.0, 1000.0])).is_log


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.00025, "2.5e-4"),
        (0.5, "0.5"),
        (1234.0, "1234"),
        (12_000.0, "12k"),
        (2.5e6, "2.5M"),
        (float("nan"), "nan"),
    ],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert number_text(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (0.0042, "4.2 ms"),
        (0.5, "500 ms"),
        (0.2134, "213 ms"),
        (9.99, "10 s"),
        (59.7, "1 min"),
        (200, "3 min 20 s"),
        (7500, "2 h 5 min"),
        (3 * 86400 + 7200, "3 d 2 h"),
    ],
)
def test_durations_in_the_units_that_matter(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text

from __future__ import annotations

import io

import numpy as np
import pytest
from rich.console import Console

from drivetrain.view.run_view import RunView
from drivetrain.view.series import Scale, make_series
from drivetrain.view.terminal.panels import (
    attempt_lines,
    braille,
    rank_lines,
    slowest_sentence,
)
from drivetrain.view.terminal.screen import screen
from tests.view.runs import attempt, means, run_view


def frame(run: RunView, width: int, height: int) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=width, height=height, highlight=False, force_terminal=False)
    console.print(screen(run, width, height), height=height)
    return out.getvalue().splitlines()


@pytest.mark.parametrize("size", [(80, 24), (160, 50), (60, 18), (200, 60)])
@pytest.mark.parametrize("num_ranks", [1, 4, 4096])
def test_a_frame_is_exactly_as_large_as_the_terminal(size: tuple[int, int], num_ranks: int) -> None:
    width, height = size
    lines = frame(run_view(recent=means(num_ranks)), width, height)
    assert len(lines) == height
    assert max(map(len, lines)) <= width


def test_a_frame_shows_what_matters() -> None:
    shown = "\n".join(frame(run_view(), 100, 30))
    for said in (
        "digits",
        "finished",
        "100/100",
        "0.02",
        "goodput 80%",
        "recovery",
        "step 50: saved",
    ):
        assert said in shown


def test_a_run_that_has_only_begun_has_a_frame() -> None:
    nothing = run_view(scalars={}, attempts=[], checkpoints=[], ledger=None, recent=None, events=[])
    assert "no steps yet" in "\n".join(frame(nothing, 80, 24))


def dots(lines: list[str]) -> set[tuple[int, int]]:
    """(column, row from the top) of every dot."""
    bits = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
    return {
        (2 * x + c, 4 * y + r)
        for y, line in enumerate(lines)
        for x, cell in enumerate(line)
        if cell != " "
        for c in (0, 1)
        for r in range(4)
        if ord(cell) - 0x2800 & bits[c][r]
    }


def test_a_straight_line_is_straight_and_reaches_both_ends() -> None:
    series = make_series("x", [0, 100], [0.0, 1.0])
    drawn = dots(braille(series, Scale(0, 100), Scale(0, 1), 20, 10))
    assert {x for x, _ in drawn} == set(range(40))
    assert (0, 39) in drawn
    assert (39, 0) in drawn
    assert all(abs((39 - y) - x) <= 1 for x, y in drawn)


def test_a_spike_between_columns_is_drawn() -> None:
    values = np.zeros(10_000)
    values[5000] = 1.0
    drawn = dots(
        braille(make_series("x", range(10_000), values), Scale(0, 9999), Scale(0, 1), 20, 5)
    )
    assert min(y for _, y in drawn) == 0
    assert {x for x, y in drawn if y < 5} <= {19, 20}


def test_few_ranks_have_a_bar_each_and_many_a_map() -> None:
    bars = [line.plain for line in rank_lines(means(4, slow=2), 60, 10)]
    assert len(bars) == 5
    assert bars[3].count("█") == max(line.count("█") for line in bars[1:])
    assert max(map(len, bars)) <= 60
    cells = [line.plain for line in rank_lines(means(4096, slow=77), 60, 10)]
    assert len(cells) <= 10
    assert "a cell is the slowest of 10 ranks" in cells[0]
    assert "".join(cells[1:]).count("█") == 1
    few = [line.plain for line in rank_lines(means(64, slow=7), 60, 10)]
    assert max(map(len, few)) <= 60
    assert few[1].count("█") == 3  # one rank, three cells wide


def test_the_slowest_rank_is_named_by_its_own_work() -> None:
    assert slowest_sentence(means(8, slow=5)) == "slowest: 5, 320 ms, +45%"


def test_values_that_are_no_numbers_are_said_so() -> None:
    broken = make_series("train/loss", [1, 2, 3, 4], [1.0, np.nan, 1.0, 0.5])
    shown = "\n".join(frame(run_view(scalars={"train/loss": broken}), 100, 30))
    assert "1 value is not finite, first at step 2" in shown


def test_one_rank_is_not_called_ranks() -> None:
    shown = "\n".join(frame(run_view(recent=means(1)), 100, 30))
    assert "1 rank  slowest" in shown


def test_an_attempt_without_a_step_has_none() -> None:
    idle = attempt(1, 1000.0, 1030.0, kind="failed", last_step=0)
    assert "none" in attempt_lines(run_view(attempts=[idle]), 5)[0].plain

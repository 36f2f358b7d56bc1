from __future__ import annotations

import numpy as np
import pytest

from drivetrain.view.builders import GridBuilder
from tests.view.tables import table


def test_a_short_run_has_a_column_per_step() -> None:
    builder = GridBuilder([0, 1])
    builder.take(0, table([0.1, 0.2, 0.3]))
    builder.take(1, table([0.4, 0.5]))
    grid = builder.grid()
    assert grid is not None
    assert grid.step_edges == [1, 2, 3, 4]
    np.testing.assert_allclose(grid.seconds["compute"][0], [0.1, 0.2, 0.3], rtol=1e-6)
    assert np.isnan(grid.seconds["compute"][1, 2])


def test_columns_are_means_however_the_steps_come_in() -> None:
    values = np.random.default_rng(0).uniform(0.1, 0.3, 1000)
    whole, bit_by_bit = GridBuilder([0]), GridBuilder([0])
    whole.take(0, table(values))
    for start in range(0, 1000, 7):
        bit_by_bit.take(0, table(values[start : start + 7], start + 1))
    grids = [builder.grid() for builder in (whole, bit_by_bit)]
    assert grids[0] is not None
    assert grids[1] is not None
    np.testing.assert_allclose(grids[0].seconds["compute"], grids[1].seconds["compute"], rtol=1e-5)
    edges = grids[0].step_edges
    assert len(edges) - 1 <= 96
    for column in range(len(edges) - 1):
        mean = values[edges[column] - 1 : edges[column + 1] - 1].mean()
        assert grids[0].seconds["compute"][0, column] == pytest.approx(mean, rel=1e-5)


def test_many_ranks_share_rows_and_the_slowest_shows() -> None:
    builder = GridBuilder(range(4096))
    for row in range(4096):
        builder.take(row, table([0.9 if row == 2049 else 0.2] * 10))
    grid = builder.grid()
    assert grid is not None
    assert grid.num_ranks == 4096
    assert grid.seconds["compute"].shape == (64, 10)
    slow = np.flatnonzero(grid.seconds["compute"][:, 0] > 0.5)
    assert slow.tolist() == [32]
    assert grid.name_of_row(32) == "2,048–2,111"


def test_without_a_step_there_is_no_grid() -> None:
    assert GridBuilder([0, 1]).grid() is None
    assert GridBuilder([]).grid() is None

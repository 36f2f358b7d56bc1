from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from drivetrain.record.ledger import LABELS
from drivetrain.view.compare import Row, change_text, compare_runs
from drivetrain.view.page import compare_page
from drivetrain.view.palette import words
from drivetrain.view.series import make_series
from drivetrain.view.summary import key_figures
from drivetrain.view.terminal.screen import show_comparison
from tests.view.runs import ledger, run_view


def other() -> dict[str, object]:
    steps = np.arange(1, 51)
    return {
        "name": "digits-lr",
        "step": 50,
        "end_s": 1030.0,
        "scalars": {
            "train/loss": make_series("train/loss", steps, 4.0 / steps),
            "val/accuracy": make_series("val/accuracy", [50], [0.9]),
        },
        "ledger": ledger(productive=24.0, data_wait=6.0),
        "config": {"seed": ("42", "default"), "max_steps": ("50", "file")},
    }


def test_only_what_differs_is_told_of_the_config() -> None:
    found = compare_runs(run_view(), run_view(**other()))
    assert [(row.name, row.here, row.there) for row in found.config] == [("max_steps", "100", "50")]
    assert found.facts == []


def test_a_key_only_one_of_them_has_is_a_difference() -> None:
    there = run_view(config={"seed": ("42", "default")})
    assert [(r.name, r.there) for r in compare_runs(run_view(), there).config] == [
        ("max_steps", "–")
    ]


def test_last_values_and_classes_stand_side_by_side() -> None:
    found = compare_runs(run_view(), run_view(**other()))
    metrics = {row.name: row for row in found.metrics}
    assert (metrics["train/loss"].here, metrics["train/loss"].there) == ("0.02", "0.08")
    assert metrics["train/loss"].change == "×4"
    assert metrics["val/accuracy"].here == "–"
    times = {row.name: row for row in found.ledger}
    assert times["data wait"].here == "0 s"
    assert times["goodput"].there == "80.0%"


def test_report_and_status_use_the_same_words() -> None:
    assert words("start_up") == LABELS["start_up"]
    rates = make_series("throughput/samples_per_sec", [1, 2, 3], [10.0, 40.0, 30.0])
    shown = dict(key_figures(run_view(scalars={"throughput/samples_per_sec": rates})))
    assert shown["samples/s, median"] == "30.0"


def test_times_of_one_row_have_one_unit() -> None:
    here, there = ledger(productive=24.0, data_wait=0.153), ledger(productive=24.0, data_wait=6.4)
    found = compare_runs(run_view(ledger=here), run_view(ledger=there))
    row = next(row for row in found.ledger if row.name == "data wait")
    assert (row.here, row.there) == ("0.15 s", "6.4 s")


def test_time_between_runs_is_a_row_only_if_there_is_any() -> None:
    extended = replace(ledger(productive=24.0), between_runs_s=120.0)
    found = compare_runs(run_view(), run_view(ledger=extended))
    assert found.ledger[-1] == Row("between runs, not counted", "0 s", "2 min")
    assert "between" not in compare_runs(run_view(), run_view()).ledger[-1].name


def test_a_last_loss_that_is_no_number_is_not_mistaken_for_a_missing_one() -> None:
    broken = {"train/loss": make_series("train/loss", [1, 2], [1.0, np.nan])}
    found = compare_runs(run_view(), run_view(scalars=broken))
    assert next(row for row in found.metrics if row.name == "train/loss").there == "nan"


@pytest.mark.parametrize(
    ("here", "there", "text"),
    [
        (1.0, 1.0, "the same"),
        (1.0, 1.042, "+4.2%"),
        (2.0, 1.9, "-5.0%"),
        (1.0, 3.1, "×3.1"),
        (1.0, 1.00001, "+0.001%"),
        (1.0, 1.0 - 5.4e-5, "-0.0054%"),
        (1.0, 1.0 + 1e-12, "below 0.0001%"),
        (2.0, 10_960.0, "×5,480"),
        (10_960.0, 2.0, "÷5,480"),
        (0.0, 1.0, ""),
        (float("nan"), 1.0, ""),
    ],
)
def test_changes(here: float, there: float, text: str) -> None:
    assert change_text(here, there) == text


def test_the_page_lays_the_curves_over_each_other() -> None:
    page = compare_page(compare_runs(run_view(), run_view(**other())), 0.0)
    assert page.count('class="line line-1') >= 1
    assert page.count('class="line line-2') >= 1
    assert "only in digits-lr" in page


def test_runs_of_one_name_can_be_told_apart() -> None:
    assert compare_runs(run_view(), run_view()).names == ("digits (first)", "digits (second)")


def test_the_terminal_shows_it_in_eighty_columns() -> None:
    out = io.StringIO()
    console = Console(file=out, width=80, highlight=False, markup=False)
    show_comparison(compare_runs(run_view(), run_view(**other())), console)
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert any("max_steps" in line and "100" in line and "50" in line for line in lines)

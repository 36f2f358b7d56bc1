"""The pure parts of `make gpu-smoke`: its report, its exit code, its ten minutes."""

from __future__ import annotations

from pathlib import Path

from tests.gpu_smoke.budget import ENDING_S, TOTAL_S, Times, share
from tests.gpu_smoke.catalogue import CHECKS
from tests.gpu_smoke.report import exit_code, report
from tests.gpu_smoke.rows import (
    FAIL,
    NOT_RUN,
    PASS,
    SKIPPED,
    Result,
    Row,
    append_row,
    judged,
    read_rows,
)

GOOD = Result("fine", [Row("a", PASS, "1e-7"), Row("b", SKIPPED, "no tool")], 3.4)
BAD = Result("broken", [Row("a", PASS), judged("b", False, "x | y\nz", "```\ntrace\n```")], 61.0)
LEFT_OUT = Result("late", [Row("all", NOT_RUN, "over")])
ABSENT = Result("absent", [Row("all", SKIPPED, "needs 4 devices, there are 2")])


def test_a_check_is_as_good_as_its_worst_row() -> None:
    assert [each.state for each in (GOOD, BAD, LEFT_OUT, ABSENT)] == [PASS, FAIL, NOT_RUN, SKIPPED]
    assert Result("cut", [Row("a", PASS), Row("the rest", NOT_RUN)]).state == NOT_RUN
    assert Result("said nothing", []).state == FAIL


def test_only_a_failure_fails() -> None:
    assert exit_code([GOOD, LEFT_OUT, ABSENT]) == 0
    assert exit_code([GOOD, BAD]) == 1


def test_the_report_is_markdown_with_every_figure() -> None:
    text = report({"devices": "2 (sim)", "torch": "2.13"}, [GOOD, BAD, LEFT_OUT, ABSENT])
    lines = text.splitlines()
    assert lines[0] == ("# GPU smoke test: 1 of 4 checks passed, 1 FAIL, 1 not run, 1 skipped")
    assert lines[2] == "devices 2 (sim), torch 2.13."
    assert "| fine | PASS | 1 PASS, 1 skipped | 3 |" in lines
    assert "| b | FAIL | x \\| y z |" in lines  # a cell stays a cell
    assert "| all | skipped | needs 4 devices, there are 2 |" in lines
    assert "```\ntrace\n```" in text


def test_rows_are_kept_one_by_one(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    assert read_rows(path) == []
    for row in BAD.rows:
        append_row(path, row)
    assert read_rows(path) == BAD.rows


def test_a_check_gets_its_limit_or_what_is_left() -> None:
    times = Times(least_s=30, limit_s=120)
    assert share(times, used_s=0) == 120
    assert share(times, used_s=TOTAL_S - ENDING_S - 50) == 50
    assert share(times, used_s=TOTAL_S - ENDING_S - 29) is None


def test_no_check_can_use_more_than_the_budget() -> None:
    used_s = 0.0
    for check in CHECKS:  # each hangs
        used_s += share(check.times, used_s) or 0.0
    assert used_s <= TOTAL_S - ENDING_S


def test_names_are_unique() -> None:
    assert len({check.name for check in CHECKS}) == len(CHECKS)

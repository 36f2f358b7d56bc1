from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

from drivetrain.diagnose.finding import Finding, Kind, Severity
from drivetrain.view.compare import compare_runs
from drivetrain.view.page import compare_page, report_page
from drivetrain.view.run_view import CheckpointView, RankGrid, RunView
from drivetrain.view.series import make_series
from drivetrain.view.summary import verdict
from tests.view.runs import HOSTILE, attempt, ledger, run_view


class Tags(HTMLParser):
    """Every tag, and whether they close as they opened."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "br", "img", "link", "path"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag != "path":
            assert self.open.pop() == tag


def everything() -> RunView:
    found = Finding(
        Severity.ERROR, Kind.HANG, "rank 1 never came", "fix it", ("it is at train.py:31",)
    )
    return run_view(findings=[found], plan=[("step", 0.2, 0.25, "s")])


def test_the_page_is_whole_and_needs_nothing_else() -> None:
    page = report_page(everything(), 2000.0)
    tags = Tags(page)
    assert tags.open == []
    assert tags.addresses == []
    assert "script" not in tags.seen
    assert "http" not in re.sub(r"http-equiv", "", page)
    assert "@import" not in page
    assert "url(" not in page
    assert "prefers-color-scheme" in page


@pytest.mark.parametrize(
    "said",
    [
        "Rank 1 never came.",
        "it is at train.py:31",
        "Fix it.",
        "rank 1 was killed",
        "Loss",
        "Samples per second",
        "goodput",
        "80.0%",
        "max_steps",
        "command line",
        "measured ÷ predicted",
        "1.25",
        "node-0",
    ],
)
def test_the_page_says(said: str) -> None:
    assert said in report_page(everything(), 2000.0)


def test_the_page_says_how_much_was_written() -> None:
    plain = report_page(run_view(checkpoints=[CheckpointView(50, 1, 1028.0, 0.2, 1.5)]), 2000.0)
    assert "in earlier ones" not in plain
    assert '<td class="number">–</td></tr>' in plain, "a run that did not record it"
    save = CheckpointView(50, 1, 1028.0, 0.2, 1.5, 3 << 20, 7 << 20)
    page = report_page(run_view(checkpoints=[save]), 2000.0)
    assert "unchanged, in earlier ones" in page
    assert '<td class="number">3.0 MiB</td><td class="number">7.0 MiB</td></tr>' in page


def test_a_run_that_has_only_begun_has_a_page() -> None:
    page = report_page(
        run_view(scalars={}, attempts=[], checkpoints=[], ledger=None, ranks=None, step=0), 2000.0
    )
    assert Tags(page).open == []


def test_hostile_names_reach_the_page_as_words_only() -> None:
    run = run_view(
        name=HOSTILE,
        state=HOSTILE,
        scalars={HOSTILE: make_series(HOSTILE, [1, 2], [1.0, 2.0])},
        attempts=[attempt(1, 1000.0, 1060.0, kind=HOSTILE, what=HOSTILE, host=HOSTILE)],
        ledger=replace(ledger(productive=1.0), seconds={HOSTILE: 1.0}),
        facts={HOSTILE: HOSTILE},
        config={HOSTILE: (HOSTILE, HOSTILE)},
        findings=[Finding(Severity.NOTE, Kind.CRASH, HOSTILE, HOSTILE, (HOSTILE,), line=HOSTILE)],
        plan=[(HOSTILE, 1.0, 1.0, HOSTILE)],
    )
    for page in (report_page(run, 0.0), compare_page(compare_runs(run, run_view()), 0.0)):
        seen = Tags(page).seen
        assert "script" not in seen
        assert "img" not in seen
        assert seen.count("style") == 1


def test_the_verdict_says_what_became_of_the_run() -> None:
    said = verdict(run_view())
    assert said.startswith("Finished 100 of 100 steps on 2 ranks in 1 min.")
    assert "It took 2 attempts (1 failed before the last)." in said
    assert "80% of the time went into productive steps; most of the rest was recovery" in said
    assert "The loss fell from 2 to 0.02." in said


def test_the_verdict_says_a_cause_once() -> None:
    failed = [attempt(1, 1000.0, 1030.0, kind="failed", what="rank 1: ValueError: no.")]
    lost = Finding(Severity.ERROR, Kind.CRASH, "rank 1 failed: ValueError: no", "fix", attempt=1)
    said = verdict(run_view(state="failed", attempts=failed, findings=[lost]))
    assert said.count("ValueError") == 1
    for findings in ([], [replace(lost, attempt=0)], [replace(lost, severity=Severity.NOTE)]):
        said = verdict(run_view(state="failed", attempts=failed, findings=findings))
        assert "after step 100 of 100 on 2 ranks: rank 1: ValueError: no. " in said


def test_the_verdict_of_one_step_that_changed_nothing() -> None:
    one = {"train/loss": make_series("train/loss", [1], [0.5])}
    said = verdict(run_view(step=1, total_steps=None, scalars=one))
    assert said.startswith("Finished 1 step on 2 ranks")
    assert "The loss is 0.5, as at the start." in said


@pytest.mark.parametrize(("first_step", "is_marked"), [(51, True), (1, False), (101, False)])
def test_only_a_resumed_attempt_has_a_dotted_line(first_step: int, is_marked: bool) -> None:
    again = attempt(2, 1035.0, 1060.0, first_step=first_step, last_step=first_step)
    page = report_page(run_view(attempts=[attempt(1, 1000.0, 1030.0), again]), 2000.0)
    assert ("Dotted lines mark" in page) is is_marked
    assert ('class="mark"' in page) is is_marked


def test_an_attempt_without_a_step_has_none() -> None:
    idle = attempt(1, 1000.0, 1030.0, kind="failed", last_step=0)
    page = report_page(run_view(attempts=[idle]), 2000.0)
    assert '<td class="number">none</td>' in page
    assert "failed, steps: none, 30 s" in page


def test_the_note_below_the_ranks_counts_what_a_cell_is() -> None:
    many = RankGrid([0, 2, 4], [1, 2, 3], {"compute": np.full((2, 2), 0.2, np.float32)})
    page = report_page(run_view(ranks=many), 2000.0)
    assert "A row is the slowest of 2 ranks, a column is a step." in page


def test_the_verdict_never_hides_a_loss_that_is_no_number() -> None:
    steps = np.arange(1, 4)
    broken = {"train/loss": make_series("train/loss", steps, [1.0, np.nan, 0.9])}
    assert "not finite at step 2" in verdict(run_view(scalars=broken))
    ended = {"train/loss": make_series("train/loss", steps, [1.0, 2.0, np.inf])}
    assert "no longer finite: inf at step 3" in verdict(run_view(scalars=ended))


@pytest.mark.parametrize(
    "state", ["running", "preempted", "quiet", "restarting", "failed", "stalled"]
)
def test_every_state_has_a_sentence(state: str) -> None:
    said = verdict(run_view(state=state))
    assert "100" in said
    assert said.endswith(".")


def test_values_that_nobody_set_are_not_listed_as_set() -> None:
    config = {
        "seed": ("7", "command line"),
        "name": ("again", "default: in runs/old/run.yaml"),
        "optimization.momentum": ("0.9", "unused: the script has its own optimizer"),
    }
    page = report_page(run_view(config=config), 0.0)
    set_by_somebody, _, others = page.partition("Values that were set, and where.")[2].partition(
        "<details"
    )
    assert "seed" in set_by_somebody
    assert "again" not in set_by_somebody
    assert "momentum" not in set_by_somebody
    assert "again" in others

"""At which step a run saves next."""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from drivetrain.checkpoint.checkpointer import Saved
from drivetrain.cluster.environments import Identity
from drivetrain.parallel.layout import Layout
from drivetrain.parallel.world import World
from drivetrain.train.saving import timetable
from drivetrain.train.saving.timetable import Timetable


def alone() -> World:
    identity = Identity("test", 0, 0, 1, 1, 0, "127.0.0.1", 0)
    return World(identity, Layout(), torch.device("cpu"), None)


def made(every: int | Literal["auto"] | None) -> Timetable:
    return Timetable(every, alone())


def due(table: Timetable, steps: range) -> list[int]:
    return [step for step in steps if table.is_due(step)]


def test_a_number_of_steps_is_counted_from_the_runs_beginning() -> None:
    table = made(5)
    table.begin(7)  # gone on from there
    assert due(table, range(8, 12)) == [10, 11]  # one that was missed is made up for
    table.settle_next(10)
    assert due(table, range(11, 16)) == [15]
    assert not table.wants_interval


def test_never_means_never() -> None:
    table = made(None)
    table.begin(0)
    assert not due(table, range(1000))
    assert not table.wants_interval


def test_auto_saves_early_and_goes_by_what_that_cost() -> None:
    table = made("auto")
    table.begin(0)
    assert table.wants_interval
    assert table.choose_interval(100, 0.1, (0.0, 0.0)) is None
    assert due(table, range(100, 121)) == [120]
    table.note(Saved(120, blocked_s=0.5, beside_s=0.0))
    table.settle_next(120)
    assert table.wants_interval
    interval = table.choose_interval(121, 0.1, (0.0, 0.0))
    assert interval is not None
    assert interval.steps == 1200  # √(2 × 0.5 s × 4 h) = 120 s
    assert not table.is_due(1320)
    assert table.is_due(1321)


def test_a_failure_is_tried_again_after_a_while_and_forgiven_by_a_save(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = made(5)
    assert not table.has_failed
    table.note(Saved(5, 0.0, 0.0, problem="no space"))
    assert table.has_failed
    assert not table.wants_retry
    monkeypatch.setattr(timetable, "_RETRY_AFTER_S", -1.0)
    assert table.wants_retry
    table.forgive()
    assert not table.has_failed
    assert not table.wants_retry

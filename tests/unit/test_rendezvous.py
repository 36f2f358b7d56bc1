"""Meeting in a folder, in one process."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from drivetrain.supervise.rendezvous import meet_in_folder


def test_a_node_that_comes_after_the_end_is_told_that_the_run_is_done(tmp_path: Path) -> None:
    first, late = (meet_in_folder(tmp_path, (1, 1), "127.0.0.1", {}) for _ in range(2))
    first.next_rendezvous()
    assert not late.has_finished
    first.close_finished()
    first.shutdown()
    assert late.is_closed()
    assert late.has_finished
    assert late.meeting.forget_the_dead(timedelta(0))  # what comes next in this folder is a new run
    assert not late.has_finished


def test_a_group_that_was_given_up_is_not_a_run_that_is_done(tmp_path: Path) -> None:
    first, late = (meet_in_folder(tmp_path, (1, 1), "127.0.0.1", {}) for _ in range(2))
    first.next_rendezvous()
    first.set_closed()
    first.shutdown()
    assert late.is_closed()
    assert not late.has_finished

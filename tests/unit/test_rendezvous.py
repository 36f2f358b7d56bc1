"""Meeting in a folder, in one process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

from drivetrain.supervise.meeting.rendezvous import FolderRendezvous, meet_in_folder


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


def _meet(handlers: Sequence[FolderRendezvous]) -> list[tuple[int, int]]:
    """All at once; rank and number of nodes, as each was told."""
    with ThreadPoolExecutor(len(handlers)) as pool:
        met = list(pool.map(lambda handler: handler.next_rendezvous(), handlers))
    return sorted((each.rank, each.world_size) for each in met)


def test_many_nodes_that_come_at_once_change_the_list_once_each(tmp_path: Path) -> None:
    nodes = [meet_in_folder(tmp_path, (24, 24), "127.0.0.1", {}) for _ in range(24)]
    assert _meet(nodes) == [(rank, 24) for rank in range(24)]
    head = nodes[0].meeting.head()
    assert head is not None
    assert head.version == 24  # nobody's change was lost and made again
    assert head.turn == 1  # and those who waited were told once


def test_a_node_without_a_sign_of_life_is_left_out(tmp_path: Path) -> None:
    settings = {"keep_alive_interval": 1, "keep_alive_max_attempt": 2, "last_call_timeout": 1}
    nodes = [meet_in_folder(tmp_path, (2, 3), "127.0.0.1", settings) for _ in range(3)]
    assert _meet(nodes) == [(rank, 3) for rank in range(3)]
    nodes[0]._stop_heartbeats()  # as if its host had been switched off
    assert _meet(nodes[1:]) == [(0, 2), (1, 2)]
    assert {node.round for node in nodes[1:]} == {1}


def test_who_lives_changes_nothing_that_others_must_read(tmp_path: Path) -> None:
    settings = {"keep_alive_interval": 1, "keep_alive_max_attempt": 2}
    nodes = [meet_in_folder(tmp_path, (2, 2), "127.0.0.1", settings) for _ in range(2)]
    _meet(nodes)
    before = nodes[0].meeting.head()
    time.sleep(2.5)  # longer than a node without a sign of life would be believed to live
    assert nodes[0].num_nodes_waiting() == 0
    assert nodes[0].meeting.head() == before
    alive = datetime.now(UTC) - timedelta(seconds=2)
    assert all(node.meeting.last_sign(node._this_node) > alive for node in nodes)

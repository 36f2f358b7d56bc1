"""Rendezvous in a folder, in one process."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc

from drivetrain.core.errors import EnvironmentProblem
from drivetrain.launch.coordinator import member
from drivetrain.supervise.rendezvous.handler import FolderRendezvous, join_in_folder
from drivetrain.supervise.rendezvous.rules import LastCall
from drivetrain.supervise.rendezvous.signs import Alive, SignsOfLife


def test_a_node_that_comes_after_the_end_is_told_that_the_run_is_done(tmp_path: Path) -> None:
    first, late = (join_in_folder(tmp_path, (1, 1), "127.0.0.1", {}) for _ in range(2))
    first.next_rendezvous()
    assert not late.has_finished
    first.close_finished()
    first.shutdown()
    assert late.is_closed()
    assert late.has_finished
    # who has said goodbye is not waited for; what comes next in this folder is a new run
    assert late.members.forget_the_dead(lambda _: False)
    assert not late.has_finished


def test_a_group_that_was_given_up_is_not_a_run_that_is_done(tmp_path: Path) -> None:
    first, late = (join_in_folder(tmp_path, (1, 1), "127.0.0.1", {}) for _ in range(2))
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
    nodes = [join_in_folder(tmp_path, (24, 24), "127.0.0.1", {}) for _ in range(24)]
    assert _meet(nodes) == [(rank, 24) for rank in range(24)]
    head = nodes[0].members.head()
    assert head is not None
    assert head.version == 24  # nobody's change was lost and made again
    assert head.turn == 1  # and those who waited were told once


def test_a_node_without_a_sign_of_life_is_left_out(tmp_path: Path) -> None:
    settings = {"keep_alive_interval": 1, "keep_alive_max_attempt": 2, "last_call_timeout": 1}
    nodes = [join_in_folder(tmp_path, (2, 3), "127.0.0.1", settings) for _ in range(3)]
    assert _meet(nodes) == [(rank, 3) for rank in range(3)]
    nodes[0]._stop_heartbeats()  # as if its host had been switched off
    assert _meet(nodes[1:]) == [(0, 2), (1, 2)]
    assert {node.round for node in nodes[1:]} == {1}


def test_who_lives_changes_nothing_that_others_must_read(tmp_path: Path) -> None:
    settings = {"keep_alive_interval": 1, "keep_alive_max_attempt": 2}
    nodes = [join_in_folder(tmp_path, (2, 2), "127.0.0.1", settings) for _ in range(2)]
    _meet(nodes)
    before = nodes[0].members.head()
    nodes[0]._nodes.is_dead(nodes[1]._this_node)
    time.sleep(2.5)  # longer than a node without a sign of life would be believed to live
    assert nodes[0].num_nodes_waiting() == 0
    assert nodes[0].members.head() == before
    assert nodes[0]._nodes.state.participants.keys() == {node._this_node for node in nodes}
    assert not any(nodes[0]._nodes.is_dead(node._this_node) for node in nodes)


# One node reads all signs for the others


class View:
    """What one of some nodes sees of their signs."""

    def __init__(self, folder: Path, node: _NodeDesc, nodes: list[_NodeDesc]) -> None:
        self.signs, self.node, self.nodes = SignsOfLife(folder), node, nodes
        self.give()

    def give(self) -> None:
        self.signs.give(self.node)

    def all(self) -> dict[_NodeDesc, str]:
        found = self.signs.all(lambda: self.nodes)
        return {node: found[str(node)] for node in self.nodes if str(node) in found}


def _signs_of(folder: Path, count: int) -> tuple[list[_NodeDesc], list[View]]:
    """Nodes that have given a sign, and what each of them sees."""
    nodes = [_NodeDesc("host", 1, index) for index in range(count)]
    return nodes, [View(folder, node, nodes) for node in nodes]


def test_only_one_node_reads_the_files_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes, views = _signs_of(tmp_path, 8)
    SignsOfLife(tmp_path).give(_NodeDesc("host", 0, 0))  # of somebody who is no longer there
    read: list[int] = []
    original = SignsOfLife._read

    def counted(signs: SignsOfLife, node: _NodeDesc) -> bytes:
        read.append([view.signs for view in views].index(signs))
        return original(signs, node)

    monkeypatch.setattr(SignsOfLife, "_read", counted)
    seen: list[dict[_NodeDesc, str]] = []
    for _ in range(5):
        seen.append(views[0].all())
        assert all(view.all() == seen[-1] for view in views[1:])
        views[3].give()
    assert read == [0] * 5 * 8
    assert len({signs[nodes[3]] for signs in seen}) == 5
    assert len({signs[nodes[4]] for signs in seen}) == 1


def test_another_collects_when_the_one_that_did_is_gone(tmp_path: Path) -> None:
    nodes, views = _signs_of(tmp_path, 3)
    before = views[0].all()
    assert views[1].all() == views[2].all() == before
    views[1].give()
    after = views[2].all()
    assert after[nodes[1]] != before[nodes[1]]
    assert views[1].all() == after


def test_a_node_that_stops_while_it_collects_makes_nobody_else_look_dead(tmp_path: Path) -> None:
    settings = {"keep_alive_interval": 1, "keep_alive_max_attempt": 2}
    nodes = [join_in_folder(tmp_path, (3, 3), "127.0.0.1", settings) for _ in range(3)]
    _meet(nodes)
    nodes[2]._stop_heartbeats()
    dead: set[int] = set()
    with (tmp_path / "signs.lock").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        deadline_s = time.monotonic() + 6
        while time.monotonic() < deadline_s:
            dead |= {index for index in (1, 2) if nodes[0]._nodes.is_dead(nodes[index]._this_node)}
            time.sleep(0.2)
    assert dead == {2}


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"signs": 1}', b"\xff" * 20])
def test_a_damaged_collection_is_replaced(tmp_path: Path, damage: bytes) -> None:
    nodes, views = _signs_of(tmp_path, 2)
    (tmp_path / "signs").write_bytes(damage)
    views[0].all()
    found = views[0].all()
    assert found.keys() == set(nodes)
    assert views[1].all() == found


def test_signs_are_seen_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes, views = _signs_of(tmp_path, 2)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    views[0].all()
    monkeypatch.setattr("drivetrain.supervise.rendezvous.signs.write_whole", full)
    found = []
    for _ in range(4):
        views[1].give()
        found.append(views[0].all()[nodes[1]])
    assert len(set(found)) == 4


# Clocks of other machines


class Clock:
    """A reader's own."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_who_gives_signs_is_alive_whatever_they_say_and_who_gives_none_is_not() -> None:
    clock, signs = Clock(), {"ahead": 600.0, "behind": -600.0, "dead": 600.0}
    read = signs.__getitem__
    alive = Alive(read, read, patience_s=12, look_s=3, clock=clock)
    dead: dict[str, float] = {}
    for second in range(60):
        clock.now_s = second
        for who in signs:
            if who != "dead":
                signs[who] += 1
            if alive.is_dead(who):
                dead.setdefault(who, second)
    assert dead == {"dead": 16}


def test_a_sign_that_was_the_same_long_ago_is_of_one_who_is_dead() -> None:
    clock = Clock()
    read = {"a": 1, "b": 1}.get
    alive = Alive(read, read, patience_s=12, look_s=3, clock=clock)
    for clock.now_s in (0.0, 3.0):
        assert not alive.is_dead("a")
    clock.now_s = 3600.0
    assert alive.is_dead("a")
    assert not alive.is_dead("b"), "nobody has looked at it before"


def test_who_has_not_looked_for_long_looks_once_more_before_somebody_is_dead() -> None:
    """What was collected may be older than that."""
    clock, collected, now = Clock(), {"a": 1, "b": 1}, {"a": 1, "b": 1}
    alive = Alive(collected.get, now.get, patience_s=12, look_s=3, clock=clock)
    for clock.now_s in (0.0, 3.0):
        assert not any(map(alive.is_dead, "ab"))
    now["a"] = 2
    clock.now_s = 60.0
    assert not alive.is_dead("a")
    assert alive.is_dead("b")


@pytest.mark.parametrize("collected", [{}, {"living": 1, "dead": 1}, {"living": 1, "dead": 2}])
def test_who_dies_is_found_when_nobody_collects_any_more(collected: dict[str, int]) -> None:
    clock, now = Clock(), {"living": 1, "dead": 2}
    alive = Alive(collected.get, now.__getitem__, patience_s=12, look_s=3, clock=clock)
    dead: dict[str, float] = {}
    for second in range(60):
        clock.now_s = second
        now["living"] += 1
        for who in now:
            if alive.is_dead(who):
                dead.setdefault(who, second)
    assert dead.keys() == {"dead"}
    assert dead["dead"] <= 2 * (12 + 3)


@pytest.mark.parametrize("skew_s", [-600, 600])
def test_a_last_call_lasts_as_long_by_every_clock(skew_s: float) -> None:
    clock = Clock()
    call = LastCall(5, clock)
    written = datetime.now(UTC) + timedelta(seconds=skew_s)
    for clock.now_s in (0.0, 4.9, 5.0, 9.0):
        seen = call.as_seen(written)
        assert seen is not None
        assert (seen < datetime.now(UTC)) == (clock.now_s >= 5)
        assert call.as_seen(seen) == seen
        assert call.as_written(seen) == written, "the others go on counting"
    another = written + timedelta(seconds=1)
    assert call.as_written(another) == another
    assert call.as_seen(another) == datetime.max.replace(tzinfo=UTC), "and is counted anew"
    assert call.as_seen(None) is None


def test_no_sign_of_life_is_read_as_a_time(tmp_path: Path) -> None:
    """Neither a file's time nor a written one: here both are ten minutes off, either way."""
    settings = {"keep_alive_interval": 1, "keep_alive_max_attempt": 2, "last_call_timeout": 1}
    nodes = [join_in_folder(tmp_path, (3, 3), "127.0.0.1", settings) for _ in range(3)]
    assert _meet(nodes) == [(rank, 3) for rank in range(3)]
    for node, skew_s in zip(nodes, (-600, 0, 600), strict=True):
        at_s = time.time() + skew_s
        os.utime(tmp_path / "lives" / str(node._this_node), (at_s, at_s))
        state = nodes[0]._nodes.state
        state.last_heartbeats[node._this_node] += timedelta(seconds=skew_s)
    nodes[0]._nodes.is_joining = True
    nodes[0]._nodes.sync()
    assert len(nodes[0]._nodes.state.participants) == 3


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP])
def test_a_file_system_without_locks_is_said_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    said = r"does not support locks \(flock: .*\); mount it with locks"
    with pytest.raises(EnvironmentProblem, match=said):
        join_in_folder(tmp_path, (2, 2), "127.0.0.1", {})
    with pytest.raises(EnvironmentProblem, match=said):
        member.hold_coordinator_lock(tmp_path)
    (tmp_path / "conductor.lock").write_text("elsewhere 1")
    with pytest.raises(EnvironmentProblem, match=said):
        member.coordinator_lock_holder(tmp_path)


def test_a_lock_that_somebody_has_is_no_lack_of_locks(tmp_path: Path) -> None:
    held = member.hold_coordinator_lock(tmp_path)
    assert held is not None
    assert member.hold_coordinator_lock(tmp_path) is None
    assert member.coordinator_lock_holder(tmp_path) == (socket.gethostname(), os.getpid())
    held.close()
    assert member.coordinator_lock_holder(tmp_path) is None

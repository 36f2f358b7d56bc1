"""Nodes that finish together, each with a rendezvous of its own, in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec

from drivetrain.supervise.rendezvous.group import Group, JoinResult, Others
from drivetrain.supervise.rendezvous.handler import join_in_folder


class Member:
    """A node: what torchelastic's agent does when it meets is done by hand."""

    def __init__(self, folder: Path, nodes: tuple[int, int]) -> None:
        self.handler = join_in_folder(folder, nodes, "127.0.0.1", {"last_call_timeout": 1})
        spec = WorkerSpec("default", 1, self.handler, entrypoint="script.py")
        self.workers = WorkerGroup(spec)
        self.group = Group(self.workers, self._rendezvous)

    def _rendezvous(self, workers: WorkerGroup) -> None:
        met = self.handler.next_rendezvous()
        workers.store = met.store  # type: ignore[assignment]
        workers.group_rank, workers.group_world_size = met.rank, met.world_size  # type: ignore[assignment]


Met = Callable[[int], list[Member]]


@pytest.fixture
def met(tmp_path: Path) -> Iterator[Met]:
    """So many nodes that have met, the first one first."""
    started: list[Member] = []

    def meet(count: int) -> list[Member]:
        started.extend(Member(tmp_path, (count, count)) for _ in range(count))
        with ThreadPoolExecutor(count) as pool:
            meetings = list(pool.map(lambda member: member.group.join(), started))
        assert meetings == [JoinResult.JOINED] * count
        return sorted(started, key=lambda member: int(member.workers.group_rank or 0))

    yield meet
    for member in started:
        member.handler._stop_heartbeats()


def test_a_node_alone_has_finished_when_its_ranks_have(met: Met) -> None:
    (member,) = met(1)
    member.workers.store = None  # nobody is asked
    assert member.group.finish(1) is Others.FINISHED
    member.group.close(0)
    member.group.leave(0)


def test_the_last_node_to_finish_ends_the_wait_of_the_others(met: Met) -> None:
    first, second = met(2)
    assert first.group.finish(1) is Others.AT_WORK
    assert first.group.finish(1) is Others.AT_WORK  # said once, however often it looks
    assert second.group.finish(1) is Others.FINISHED
    assert first.group.finish(1) is Others.FINISHED


@pytest.mark.parametrize(("exit_code", "has_finished"), [(0, True), (1, False)])
def test_who_comes_after_the_end_is_told_how_it_ended(
    tmp_path: Path, met: Met, exit_code: int, has_finished: bool
) -> None:
    (member,) = met(1)
    late = Member(tmp_path, (1, 1))
    late.handler._is_first = False  # it was there before, and clears nothing
    member.group.close(exit_code)
    assert late.group.join() is JoinResult.CLOSED
    assert late.group.was_closed_finished is has_finished


@pytest.mark.parametrize("exit_code", [75, 77])
def test_a_preempted_node_goes_alone(met: Met, exit_code: int) -> None:
    first, second = met(2)
    second.group.close(exit_code)
    second.group.leave(exit_code)
    assert not first.handler.is_closed()


def test_without_the_first_nodes_store_it_is_over_only_if_the_group_was_closed(
    met: Met, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = met(2)
    second.workers.store = None  # as if it could not be reached
    assert second.group.finish(1) is Others.AT_WORK
    monkeypatch.setattr("drivetrain.supervise.rendezvous.group._STORE_PATIENCE_S", -1.0)
    assert second.group.finish(1) is Others.LOST
    first.group.close(0)
    assert second.group.finish(1) is Others.FINISHED

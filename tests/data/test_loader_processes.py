"""Shards and loader processes: which part each of them reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data._utils import worker as worker_module

from drivetrain.core.errors import ConfigError
from drivetrain.data.stream_shards import Shards, part_of, reads_shards
from drivetrain.data.worker_split import WatchedWorkers, hide_workers
from tests.data.parts import Stream


class Cut(Stream):
    def shard(self, num_shards: int, index: int) -> tuple[int, int]:
        return num_shards, index


def test_a_rank_reads_its_part_or_all_of_what_was_given() -> None:
    data = Cut(4)
    assert part_of(data, "own_shard", 3, 1) == (3, 1)
    assert part_of(data, "already_sharded", 3, 1) is data
    given_out = Shards("already_sharded", int)
    assert given_out.are_given
    assert not Shards("own_shard", int).are_given
    assert Shards("own_shard", int).part(data, 2, 0) == (2, 0)
    assert reads_shards(data, "own_shard")
    assert not reads_shards(Stream(4), "own_shard")
    assert reads_shards(Stream(4), "already_sharded")
    assert not reads_shards(data, "same_stream")
    data._distributed = 1
    with pytest.raises(ConfigError) as caught:
        reads_shards(data, "own_shard")
    assert str(caught.value) == (
        "data.iterable_sharding = own_shard: the stream was split by split_dataset_by_node; a "
        "shard of a shard leaves out samples; use already_sharded, or pass it unsplit"
    )
    assert reads_shards(data, "already_sharded")


def test_a_stream_that_is_read_whole_learns_of_no_loader_processes(worker: Any) -> None:
    assert hide_workers() == (1, 3)
    assert torch.utils.data.get_worker_info() is None
    assert hide_workers() == (0, 1)


def test_a_stream_that_asks_how_many_there_are_splits_itself(worker: Any) -> None:
    watched = WatchedWorkers()
    assert (watched.id, watched.num_workers) == (1, 3)
    info = torch.utils.data.get_worker_info()
    assert info is not None
    assert (info.id, info.num_workers, info.seed) == (1, 3, 7)
    assert watched.splits_itself() is True
    assert torch.utils.data.get_worker_info() is not None


def test_one_that_does_not_ask_is_split_here_and_one_that_asks_by_halves_refused(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = WatchedWorkers()
    assert watched.splits_itself() is False
    assert torch.utils.data.get_worker_info() is None
    monkeypatch.setattr(worker_module, "_worker_info", worker)
    watched = WatchedWorkers()
    info: Any = torch.utils.data.get_worker_info()
    assert info.seed == 7
    with pytest.raises(ConfigError, match="asks for the loader process's seed but not how many"):
        watched.splits_itself()


def test_without_loader_processes_nothing_splits() -> None:
    watched = WatchedWorkers()
    assert (watched.id, watched.num_workers, watched.splits_itself()) == (0, 1, False)

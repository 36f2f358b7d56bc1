"""Parts of reading streams, each by itself: what is refused, and in which words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from drivetrain import ConfigError
from drivetrain.config.schema import Data
from drivetrain.data.batches import BatchPlan
from drivetrain.data.device import to_device
from drivetrain.data.digest import Mark, Read
from drivetrain.data.evaluation import EvaluationFeed
from drivetrain.data.rank_check import RankCheck, _Standing
from drivetrain.data.sources import Source, source_from
from drivetrain.data.stream import StreamFeed, check_replay
from drivetrain.data.stream_shards import Shards
from drivetrain.data.worker_split import WatchedWorkers
from tests.data.parts import Ring


class Stream(IterableDataset[Any]):
    """Numbers up to a length; notes the epochs it is told of."""

    def __init__(self, length: int = 8) -> None:
        self.length = length
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.tensor([float(n)]) for n in range(self.length))


class Split(Stream):
    """As Hugging Face marks one that was split among ranks."""

    _distributed = "rank 1 of 2"


def standing(dp_index: int, position: int, *shown: int) -> _Standing:
    mark = Mark(position, hash(shown) & 0xFFFF)
    return _Standing(dp_index, 0, mark, is_end=False, is_known=True, shown=shown)


def check(answers: Any, *, shares_out: bool = False, dataset: Any = None) -> RankCheck:
    data = dataset or Stream()
    return RankCheck(answers, 1, 1, data, "already_sharded", shares_out)


def note(checked: RankCheck, at: _Standing) -> None:
    checked.note(at.epoch, at.mark, Read(Mark(), at.mark, at.shown))


def test_ranks_of_one_model_copy_that_read_different_parts_are_named() -> None:
    checked = check(Ring(standing(1, 4, 7, 8)), shares_out=True)
    with pytest.raises(ConfigError) as error:
        note(checked, standing(1, 4, 5, 6))
    assert str(error.value) == (
        "data = Stream: rank 1 and rank 0 work on the same samples (tp, cp or pp), but rank 1 "
        "reads different samples than rank 0: the dataset gives each rank its own part, or "
        "shuffles with its own random numbers; split it by data-parallel rank: ranks of one "
        "replica read the same part"
    )


def test_parts_that_are_the_same_are_named() -> None:
    checked = check(Ring(standing(0, 4, 5, 6)), shares_out=True)
    with pytest.raises(ConfigError) as error:
        note(checked, standing(1, 4, 5, 6))
    assert str(error.value) == (
        "data.iterable_sharding = already_sharded: rank 1 reads the same samples as rank 0, so "
        "each would be used more than once; give each rank its own part, or use same_stream"
    )


def test_the_first_two_steps_of_an_epoch_are_settled_before_they_are_used() -> None:
    answers = Ring()
    checked = check(answers)
    settled = []
    for epoch in range(2):
        checked.begin_epoch()
        for step in range(4):
            at = standing(1, 4 * epoch + step, step)
            checked.note(epoch, at.mark, Read(Mark(), at.mark, at.shown))
            settled.append(answers.num_heard == len(answers.told))
    assert settled == [True, True, False, False] * 2


def test_what_cannot_be_told_apart_is_said_once() -> None:
    checked = RankCheck(Ring(), 0, 0, Stream(), "same_stream", shares_out=False)  # type: ignore[arg-type]
    read = Read(Mark(), Mark(1, 1), is_known=False)
    with pytest.warns(UserWarning, match="samples of Stream contain objects") as said:
        checked.note(0, read.after, read)
        checked.note(0, read.after, read)
    assert len(said) == 1


def test_a_stream_that_gives_something_else_after_a_resume_says_what_has_split_it() -> None:
    with pytest.raises(ConfigError) as error:
        check_replay(Split(), Mark(4, 1), Mark(4, 2))
    assert str(error.value) == (
        "data = Split: does not repeat the samples that it gave before the run was saved; resume "
        "with the same data, or add --accept-change data.content before the script; it was split "
        "by split_dataset_by_node: pass it unsplit, or set data.iterable_sharding=already_sharded"
    )
    with pytest.raises(ConfigError, match="has 3 samples, but the run had used 4 when"):
        check_replay(Stream(), Mark(4, 1), Mark(3, 1))
    check_replay(Stream(), Mark(4, 1), Mark(4, 1))


def test_a_stream_that_asks_for_half_of_what_splits_it_is_refused() -> None:
    watched = WatchedWorkers()
    watched.num_workers, watched._asked = 3, {"seed", "id"}
    with pytest.raises(ConfigError) as error:
        watched.splits_itself()
    assert str(error.value) == (
        "data.num_workers = 3: the stream asks for the loader process's id and seed but not how "
        "many there are, so it is unknown whether each process reads its own part; split "
        "it by get_worker_info().id and .num_workers, or use 0"
    )


def test_every_epoch_of_a_stream_is_told_its_number() -> None:
    stream = Stream(4)
    feed = StreamFeed(Source(stream, None, shuffle=False), BatchPlan(2, 2, 1, None), 0, 42)
    assert len([turn for step in feed.steps(4, None) for turn in step]) == 4
    assert sorted(set(stream.epochs)) == [0, 1]


def fed(stream: Stream, sums: int) -> StreamFeed:
    """Rank 1 of two, whose ranks have `sums` samples together."""
    shards = Shards("already_sharded", lambda _: sums)
    return StreamFeed(
        Source(stream, None, shuffle=False), BatchPlan(4, 2, 2, None), 1, 42, shards=shards
    )


def test_a_rank_without_any_sample_is_named() -> None:
    with pytest.raises(ConfigError) as error:
        next(iter(fed(Stream(0), sums=2).steps(1, None)))
    assert str(error.value) == (
        "data.iterable_sharding = already_sharded: rank 1's shard of the stream is empty; use "
        "same_stream, or fewer ranks"
    )


def test_a_rank_without_any_sample_to_evaluate_is_named() -> None:
    shards = Shards("already_sharded", lambda own: own + 1)
    feed = EvaluationFeed(Source(Stream(0), None, shuffle=False), 2, 1, 2, shards=shards)
    with pytest.raises(ConfigError) as error:
        list(feed.batches(in_lockstep=True))
    assert str(error.value) == "val: rank 1's shard of it is empty; use fewer ranks"


@pytest.mark.parametrize(
    ("num_shards", "words"),
    [
        (
            None,
            "data.iterable_sharding = already_sharded: the run was saved reading the whole "
            "stream, and would resume reading 2 shards; ",
        ),
        (
            3,
            "data.iterable_sharding = already_sharded: the run was saved reading 3 shards, and "
            "would resume reading 2 shards; ",
        ),
    ],
)
def test_shards_of_another_number_of_ranks_are_refused(num_shards: int | None, words: str) -> None:
    feed = fed(Stream(), sums=4)
    with pytest.raises(ConfigError) as error:
        feed.load_state_dict({**feed.state_dict(), "num_shards": num_shards})
    assert str(error.value) == words + "use as many ranks as before, or same_stream from the start"


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_distributed_sampler_only_says_whether_to_shuffle(shuffle: bool) -> None:
    data = TensorDataset(torch.ones(8, 2))
    sampler: DistributedSampler[Any] = DistributedSampler(
        data, num_replicas=2, rank=1, shuffle=shuffle
    )
    source = source_from(DataLoader(data, batch_size=2, sampler=sampler), Data())
    assert source.shuffle is shuffle
    assert source.sampler is None
    assert source.is_batched is False


def test_the_largest_of_the_first_samples_is_the_one_that_memory_is_judged_by() -> None:
    samples = [
        {"ids": torch.ones(2), "more": [torch.zeros(0), 1, 1]},
        {"ids": torch.ones(1), "more": [torch.ones(2), 5, 5]},
        {"ids": torch.ones(1), "more": [torch.ones(1), *range(9)]},
    ]
    batch = source_from(samples, Data()).batch_of_largest(2)
    assert batch["ids"].shape == (2, 1)
    assert batch["more"][0].shape == (2, 2)


def test_a_batch_that_is_on_the_cpu_already_is_not_touched() -> None:
    batch = {"x": [torch.ones(2)]}
    assert to_device(batch, torch.device("cpu")) is batch

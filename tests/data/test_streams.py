"""Streams: read, counted, resumed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from drivetrain.core.errors import ConfigError
from drivetrain.data.batches import BatchPlan, MicroBatch
from drivetrain.data.digest import Mark, Read, chained
from drivetrain.data.keys import DATA, fold, turn_seed
from drivetrain.data.sources import Source
from drivetrain.data.stream import StreamFeed, _Reading
from drivetrain.data.stream_readers import Piece, Place, ShardReader, WholeReader
from drivetrain.data.stream_shards import Shards
from tests.data.parts import Noted, Stream, stream_source


def place(**changes: Any) -> Place:
    given = {"epoch": 2, "began": 5, "used": 0, "skipped": 0, "mark": Mark()}
    return Place(**{**given, **changes})


def pieces(reader: WholeReader) -> list[Any]:
    return [
        (
            piece.micro,
            None if piece.batch is None else piece.batch.flatten().tolist(),
            (piece.read.before.position, piece.read.after.position),
        )
        for piece in reader
        if isinstance(piece, Piece)
    ]


def test_a_whole_reader_keeps_its_ranks_turns_and_says_what_was_read() -> None:
    plan = BatchPlan(4, 2, 2, None)
    reader = WholeReader(stream_source(5), plan, 1, 42, place())
    assert pieces(reader) == [
        (MicroBatch(5, 1, 2, 4, 4, 2), [2, 3], (0, 4)),
        (MicroBatch(6, 1, 0, 0, 1, 2), [4], (4, 5)),
        (MicroBatch(7, -1, 0, 0, 0, 2), None, (5, 5)),
    ]


def test_a_reader_skips_what_was_used_and_the_steps_that_are_done() -> None:
    plan = BatchPlan(2, 2, 1, None)
    reader = WholeReader(stream_source(9), plan, 0, 42, place(used=3, skipped=2, began=5))
    assert [(micro.step, batch, read) for micro, batch, read in pieces(reader)] == [
        (7, [7, 8], (7, 9)),
        (8, None, (9, 9)),
    ]


def test_a_reader_of_ready_batches_takes_as_many_as_a_step_has() -> None:
    plan = BatchPlan(4, 2, 1, None)
    reader = WholeReader(stream_source(3, size=2), plan, 0, 42, place())
    assert reader.num_items == 2
    assert pieces(reader) == [
        (MicroBatch(5, 0, 0, 2, 4, 2), [0, 0], (0, 2)),
        (MicroBatch(5, 1, 2, 4, 4, 2), [1, 1], (0, 2)),
        (MicroBatch(6, 0, 0, 2, 2, 2), [2, 2], (2, 3)),
        (MicroBatch(6, -1, 0, 0, 2, 2), [2, 2], (2, 3)),
        *[(MicroBatch(7, -1, 0, 0, 0, 2), None, (3, 3))] * 2,
    ]
    wrong = WholeReader(stream_source(3, size=3), plan, 0, 42, place())
    (error,) = wrong
    assert isinstance(error, ConfigError)
    assert "set micro_batch_size=3" in str(error)


def test_a_shard_reader_reads_a_micro_batch_at_a_time() -> None:
    plan = BatchPlan(4, 2, 2, None)
    reader = ShardReader(stream_source(3), plan, 1, 42, place(), "already_sharded")
    assert reader.num_items == 2
    assert pieces(reader) == [
        (MicroBatch(5, -1, 0, 2, 2, 2), [0, 1], (0, 2)),
        (MicroBatch(6, -1, 0, 1, 1, 2), [2], (2, 3)),
        (MicroBatch(7, -1, 0, 0, 0, 2), None, (3, 3)),
    ]
    ready = ShardReader(stream_source(2, size=2), plan, 1, 42, place(), "already_sharded")
    assert ready.num_items == 1
    assert [(micro.stop, batch) for micro, batch, _ in pieces(ready)] == [
        (2, [0, 0]),
        (2, [1, 1]),
        (0, None),
    ]


def test_samples_are_drawn_under_the_seed_of_their_step_and_batches_of_their_turn() -> None:
    class Draws(Stream):
        def __iter__(self) -> Iterator[Any]:
            for _ in range(self.length):
                yield torch.rand(())

    def collate(samples: list[Any]) -> Any:
        return torch.stack([*samples, torch.rand(())])

    made = Source(Draws(2), None, shuffle=False, collate=collate)
    plan, key = BatchPlan(1, 1, 1, None), fold(42, DATA)
    found = [batch for _, batch, _ in pieces(WholeReader(made, plan, 0, 42, place()))]
    for step, batch in zip((5, 6), found, strict=False):
        torch.manual_seed(turn_seed(key, step, -1))
        sample = float(torch.rand(()))
        torch.manual_seed(turn_seed(key, step, 0))
        assert batch == [sample, float(torch.rand(()))]
    shard = ShardReader(made, plan, 0, 42, place(), "already_sharded")
    first, second, _ = (batch for _, batch, _ in pieces(shard))
    torch.manual_seed(turn_seed(key, 6, 1))
    assert second[1] == float(torch.rand(()))
    assert first[0] == found[0][0]


def stream_feed(length: int, plan: BatchPlan | None = None, **more: Any) -> StreamFeed:
    return StreamFeed(stream_source(length), plan or BatchPlan(2, 2, 1, None), 0, 42, **more)


def taken(feed: StreamFeed, steps: int | None, epochs: int | None = None) -> list[list[Any]]:
    return [[batch.tolist() for _, batch in turns] for turns in feed.steps(steps, epochs)]


def test_a_stream_goes_on_epoch_after_epoch() -> None:
    assert taken(stream_feed(3), 4) == [[[0, 1]], [[2]], [[0, 1]], [[2]]]
    assert taken(stream_feed(3), None, 1) == [[[0, 1]], [[2]]]
    feed = stream_feed(4)
    assert taken(feed, 2) == [[[0, 1]], [[2, 3]]]
    assert feed.sample_ids(0) == []
    with pytest.raises(ConfigError) as caught:
        taken(stream_feed(0), 1)
    assert str(caught.value) == (
        "data: the stream has no samples in epoch 0; give it at least one, or pass a dataset that "
        "can be read again"
    )


def test_a_stream_says_where_it_stands() -> None:
    feed = stream_feed(5)
    known = {
        "global_batch_size": 2,
        "num_shards": None,
        "num_workers": None,
        "seed": 42,
    }
    assert feed.state_dict() == {
        "step": 0,
        "epoch": 0,
        "epoch_began_at": 0,
        "used": 0,
        "read": [0, 0],
        **known,
    }
    steps = feed.steps(9, None)
    next(steps)
    state = feed.state_dict()
    assert (state["step"], state["epoch"], state["epoch_began_at"]) == (1, 0, 0)
    assert state["read"][0] == 2
    next(steps)
    next(steps)
    over = feed.state_dict()
    assert (over["step"], over["epoch"], over["epoch_began_at"]) == (3, 1, 3)
    assert over["read"] == [0, 0], "after a short batch the next epoch has begun"
    assert over["used"] == 0
    next(steps)
    on = feed.state_dict()
    assert (on["step"], on["epoch"], on["epoch_began_at"], on["read"][0]) == (4, 1, 3, 2)


@pytest.mark.parametrize("after", [1, 2, 3, 4])
def test_a_stream_resumes_where_it_stood(after: int) -> None:
    whole = taken(stream_feed(5), 7)
    feed = stream_feed(5)
    steps = feed.steps(7, None)
    for _ in range(after):
        next(steps)
    again = stream_feed(5)
    again.load_state_dict(feed.state_dict())
    assert taken(again, 7) == whole[after:]
    assert again.state_dict()["step"] == 7


def test_a_stream_that_is_not_what_it_was_is_refused_unless_that_was_accepted() -> None:
    feed = stream_feed(8)
    steps = feed.steps(9, None)
    next(steps)
    next(steps)
    state = feed.state_dict()
    other = StreamFeed(
        Source([torch.tensor(n + 1) for n in range(8)], None, shuffle=False),
        BatchPlan(2, 2, 1, None),
        0,
        42,
    )
    other.load_state_dict(state)
    with pytest.raises(ConfigError, match="does not repeat the samples that it gave before"):
        taken(other, 4)
    other = StreamFeed(
        Source([torch.tensor(n + 1) for n in range(8)], None, shuffle=False),
        BatchPlan(2, 2, 1, None),
        0,
        43,
    )
    other.load_state_dict(state)
    assert other.accepts_other_data, "another seed was accepted by name"
    assert taken(other, 4) == [[[5, 6]], [[7, 8]]]


def test_batches_of_another_size_begin_where_the_last_ended() -> None:
    feed = stream_feed(12)
    steps = feed.steps(9, None)
    for _ in range(3):
        next(steps)
    larger = stream_feed(12, BatchPlan(4, 4, 1, None))
    larger.load_state_dict(feed.state_dict())
    state = larger.state_dict()
    assert (state["used"], state["epoch_began_at"], state["step"]) == (6, 3, 3)
    assert taken(larger, 5) == [[[6, 7, 8, 9]], [[10, 11]]]
    sharded = stream_feed(12, BatchPlan(4, 4, 1, None), shards=Shards("already_sharded", int))
    with pytest.raises(ConfigError) as caught:
        sharded.load_state_dict({**feed.state_dict(), "num_shards": 1})
    assert str(caught.value) == (
        "global_batch_size = 4: was 2; the position in a stream's shards or ready batches is "
        "counted in batches; keep it, or use data.iterable_sharding=same_stream from the start"
    )


@pytest.mark.parametrize(
    ("before", "now", "is_refused"),
    [(2, 1, True), (1, 2, True), (0, 1, False), (1, 0, False), (2, 2, False)],
)
def test_loader_processes_of_a_shard_must_be_as_many_as_before(
    before: int, now: int, is_refused: bool
) -> None:
    made = stream_source(8, num_workers=now)
    shards = Shards("already_sharded", int)
    feed = StreamFeed(made, BatchPlan(2, 2, 1, None), 0, 42, shards=shards)
    state = {**feed.state_dict(), "num_workers": before}
    if not is_refused:
        feed.load_state_dict(state)
        return
    with pytest.raises(ConfigError) as caught:
        feed.load_state_dict(state)
    assert str(caught.value) == (
        f"data.num_workers = {now}: was {before}; loader processes split a shard, so its order "
        f"depends on them; use {before}, as before"
    )


def test_ranks_of_shards_agree_on_each_steps_size() -> None:
    told: list[int] = []

    def sums(own: int) -> int:
        told.append(own)
        return own + (3 if len(told) < 3 else 0)

    made = stream_source(3)
    shards = Shards("already_sharded", sums)
    feed = StreamFeed(made, BatchPlan(8, 2, 2, None), 1, 42, shards=shards)
    assert feed.state_dict()["num_shards"] == 2
    assert feed.state_dict()["num_workers"] == 0
    assert feed.state_dict()["read"] is None
    steps = [[(micro, batch.tolist()) for micro, batch in turns] for turns in feed.steps(2, None)]
    assert steps == [
        [
            (MicroBatch(0, 2, 0, 2, 6, 0), [0, 1]),
            (MicroBatch(0, 3, 0, 1, 6, 0), [2]),
        ],
        [
            (MicroBatch(1, 2, 0, 0, 3, 0), [2]),
            (MicroBatch(1, 3, 0, 0, 3, 0), [2]),
        ],
    ]
    assert told == [3, 0]


def test_a_check_is_told_of_every_step_and_settled_before_a_save() -> None:
    checked: Any = Noted()
    feed = stream_feed(3, check=checked)
    assert len(taken(feed, None, 1)) == 2
    assert checked.notes == [
        "begins",
        (0, 2, False, True),
        (0, 3, False, True),
        (0, 3, True, True),
        "settled",
    ]
    feed.state_dict()
    assert checked.notes[-2:] == ["settled", "settled"]


class Stateful(Stream):
    """Knows where it stands."""

    def __init__(self, length: int, *, forgets: bool = False) -> None:
        super().__init__(length)
        self.at, self.forgets = 0, forgets
        self.num_read = 0

    def __iter__(self) -> Iterator[Any]:
        start, self.at = self.at, 0
        for n in range(start, self.length):
            self.num_read += 1
            self.position = n + 1
            yield torch.tensor(n)

    def state_dict(self) -> dict[str, Any]:
        return {"at": 0 if self.forgets else getattr(self, "position", self.at)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def stateful(data: Stateful) -> StreamFeed:
    return StreamFeed(Source(data, None, shuffle=False), BatchPlan(2, 2, 1, None), 0, 42)


@pytest.mark.parametrize("forgets", [False, True])
def test_a_datasets_own_state_is_used_where_it_leads_back(
    forgets: bool, recwarn: pytest.WarningsRecorder
) -> None:
    feed = stateful(Stateful(20, forgets=forgets))
    steps = feed.steps(9, None)
    for _ in range(3):
        next(steps)
    own, state = feed.own_state, feed.state_dict()
    assert own["dataset"] == {"at": 0 if forgets else 6}
    assert own["next"] not in (0, 1)
    assert own["mark"] == state["read"]
    data = Stateful(20, forgets=forgets)
    again = stateful(data)
    again.load_state_dict(state)
    again.own_state = own
    assert taken(again, 5) == [[[6, 7]], [[8, 9]]]
    said = [str(each.message) for each in recwarn]
    assert said == (
        [
            "the state_dict of Stateful does not restore the position at which the run was saved "
            "(a shuffle buffer loses its contents): the stream is read again up to there"
        ]
        if forgets
        else []
    )
    assert (data.num_read < 8) is not forgets
    assert again.state_dict()["read"][0] == 10
    assert next(batch for turns in steps for _, batch in turns).tolist() == [6, 7], "none is lost"


def test_at_the_last_step_nothing_is_read_ahead_and_without_a_state_none_is_kept() -> None:
    feed = stateful(Stateful(20))
    steps = feed.steps(1, None)
    next(steps)
    assert feed.own_state["next"] == 0
    plain_feed = stream_feed(4)
    next(plain_feed.steps(2, None))
    own = plain_feed.own_state
    assert (own["dataset"], own["next"]) == (None, 0)
    assert own["mark"][0] == 2


def test_loader_processes_that_read_different_streams_do_not_fit_together() -> None:
    reading = _Reading.__new__(_Reading)
    reading._start, reading._seen, reading._dataset = None, {}, Stream(1)
    reading._check(Read(Mark(0, 0), Mark(2, 5)))
    reading._check(Read(Mark(0, 0), Mark(2, 5)))  # another turn of the same batch
    reading._check(Read(Mark(2, 5), Mark(4, 6)))
    with pytest.raises(ConfigError) as caught:
        reading._check(Read(Mark(4, 7), Mark(6, 8)))
    assert str(caught.value) == (
        "data = Stream: its loader processes read different samples, or in a different order; seed "
        "its shuffling the same way in every process (set_epoch(epoch), or torch's, Python's and "
        "NumPy's global generators, which follow the run's seed), or use data.num_workers=0"
    )
    reading._check(Read(Mark(0, 0), Mark(2, 9), worker=1))
    reading._check(Read(Mark(2, 9), Mark(4, 9), worker=1))


def test_parts_that_loader_processes_read_are_counted_together() -> None:
    reading = _Reading.__new__(_Reading)
    reading.mark, reading.last = Mark(4, 7), Read(Mark(4, 7), Mark(4, 7))
    part = Read(Mark(2, 1), Mark(5, 9), worker=1)
    reading._use(part)
    assert reading.mark == Mark(7, chained(7, 9))
    reading._use(part)
    assert reading.mark == Mark(7, chained(7, 9)), "another turn of the same batch"
    reading._use(Read(Mark(7, 1), Mark(9, 3)))
    assert reading.mark == Mark(9, 3)


def test_loader_processes_take_turns_at_a_stream_that_each_reads_whole(worker: Any) -> None:
    plan = BatchPlan(4, 1, 1, None)
    reader = WholeReader(stream_source(8), plan, 0, 42, place())
    found = [(micro.step, micro.index, batch) for micro, batch, _ in pieces(reader)]
    assert found == [(5, 1, [1]), (6, 0, [4]), (6, 3, [7]), (7, -1, None)]


def test_loader_processes_take_turns_at_a_shard_that_does_not_split_itself(worker: Any) -> None:
    plan = BatchPlan(4, 1, 1, None)
    reader = ShardReader(stream_source(6), plan, 0, 42, place(), "already_sharded")
    found = [(batch, piece_read) for _, batch, piece_read in pieces(reader)]
    assert found == [([1], (1, 2)), ([4], (4, 5)), (None, (6, 6))]


def test_a_shard_that_splits_itself_is_read_whole_and_under_its_workers_number(
    worker: Any,
) -> None:
    class Splits(Stream):
        def __iter__(self) -> Iterator[Any]:
            info = torch.utils.data.get_worker_info()
            assert info is not None
            return (torch.tensor(n) for n in range(info.id, self.length, info.num_workers))

    made = Source(Splits(7), None, shuffle=False)
    reader = ShardReader(made, BatchPlan(4, 1, 1, None), 0, 42, place(), "already_sharded")
    found = [piece for piece in reader if isinstance(piece, Piece)]
    assert [None if p.batch is None else p.batch.tolist() for p in found] == [[1], [4], None]
    assert {p.read.worker for p in found} == {1}


def test_a_datasets_state_is_not_asked_for_where_others_read_ahead() -> None:
    plan = BatchPlan(2, 2, 1, None)
    data = Stateful(8)

    def has(shards: Shards | None = None, **more: Any) -> bool:
        made = Source(more.pop("data", data), None, shuffle=False, **more)
        return StreamFeed(made, plan, 0, 42, shards)._can_have_state

    assert has()
    assert has(Shards("already_sharded", int))
    assert not has(Shards("own_shard", int))
    assert not has(num_workers=1)
    assert not has(data=Stream(8))


def test_a_rank_of_shards_resumes_by_its_own_mark_and_checks_it() -> None:
    def feed(length: int = 8) -> StreamFeed:
        shards = Shards("already_sharded", lambda own: own)
        return StreamFeed(stream_source(length), BatchPlan(2, 2, 1, None), 0, 42, shards=shards)

    first = feed()
    steps = first.steps(9, None)
    for _ in range(2):
        next(steps)
    state, own = first.state_dict(), first.own_state
    assert own["mark"][0] == 4
    again = feed()
    again.load_state_dict(state)
    again.own_state = own
    assert taken(again, 4) == [[[4, 5]], [[6, 7]]]
    other = feed()
    other.load_state_dict(state)
    other.own_state = {**own, "mark": [4, 1]}
    with pytest.raises(ConfigError, match="does not repeat the samples that it gave before"):
        taken(other, 4)
    shorter = feed(3)
    shorter.load_state_dict(state)
    shorter.own_state = own
    with pytest.raises(ConfigError, match="has 3 samples, but the run had used 4"):
        taken(shorter, 4)


def test_an_error_met_while_looking_ahead_is_raised_when_its_step_comes() -> None:
    class Breaks(Stateful):
        def __iter__(self) -> Iterator[Any]:
            yield from (torch.tensor(0), torch.tensor(1))
            raise ValueError("no")

    feed = stateful(Breaks(9))
    steps = feed.steps(9, None)
    assert [batch.tolist() for _, batch in next(steps)] == [[0, 1]]
    random.seed(3)
    before = random.getstate()
    assert feed.own_state["next"] == 0
    assert random.getstate() == before
    with pytest.raises(ValueError, match="^no"):
        next(steps)
    ended = stateful(Stateful(2))
    steps = ended.steps(1000, None)
    next(steps)
    assert ended.own_state["next"] == 1, "the end is something to come back to"

"""Parts of data, each by itself: which samples, in which order, and what is refused."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    default_convert,
)
from torch.utils.data._utils import worker as worker_module
from torch.utils.data._utils.worker import WorkerInfo

from drivetrain.config.schema import Data
from drivetrain.core.errors import ConfigError
from drivetrain.data import digest as digest_module
from drivetrain.data import elastic_feed, seeding
from drivetrain.data.batches import BatchPlan, DataPosition, MicroBatch, share
from drivetrain.data.device import to_device
from drivetrain.data.digest import (
    MOST_SHOWN,
    Mark,
    Read,
    ReadDigest,
    _lighter,
    add,
    chained,
    digest_of,
)
from drivetrain.data.elastic_feed import ElasticFeed, _OrderFrom, own_turns
from drivetrain.data.evaluation import EvaluationFeed
from drivetrain.data.feed import KeyedDataset, MapFeed, PlannedOrder, position_in
from drivetrain.data.fingerprint import content
from drivetrain.data.keys import DATA, SAMPLER, fold, turn_seed
from drivetrain.data.rank_check import RankCheck, _how_they_differ, _Standing, remedy_for, splits_by
from drivetrain.data.rank_sample_ids import RankSampleIds
from drivetrain.data.ray_rows import RayRows, is_ray_dataset
from drivetrain.data.reading import Collated, in_order, read, read_one
from drivetrain.data.ready_batches import first_sample, num_samples_in
from drivetrain.data.sampled_feed import Picked, PickedDataset, SampledFeed
from drivetrain.data.samplers import Drawn, UserSampler
from drivetrain.data.seeding import seed_data, seed_model, undisturbed
from drivetrain.data.sources import Source, is_stream, refuse_one_pass, source_from
from drivetrain.data.stream import StreamFeed, _Reading
from drivetrain.data.stream_readers import Piece, Place, ShardReader, WholeReader
from drivetrain.data.stream_shards import Shards, part_of, reads_shards
from drivetrain.data.worker_split import WatchedWorkers, hide_workers

# Batches


def test_a_batch_plan_begins_at_the_beginning() -> None:
    assert DataPosition() == (0, 0, 0)
    plan = BatchPlan(8, 2, 3, 20)
    assert plan.start == DataPosition(0, 0, 0)
    assert (plan.num_micro_batches, plan.accumulation, plan.steps_per_epoch) == (4, 2, 3)
    assert plan.blocks() == [range(2), range(2, 4), range(4, 4)]
    assert plan.num_idle_turns == 2


def test_parts_differ_by_at_most_one_and_the_first_are_the_larger() -> None:
    assert [share(7, 3, index) for index in range(3)] == [(0, 3), (3, 5), (5, 7)]
    assert [share(1, 3, index) for index in range(3)] == [(0, 1), (1, 1), (1, 1)]


def test_a_global_batch_is_cut_into_turns_of_every_rank() -> None:
    plan = BatchPlan(4, 2, 3, 10)
    assert plan.micro_batches(1, 0) == [MicroBatch(1, 0, 4, 6, 4, 0)]
    assert plan.micro_batches(1, 1) == [MicroBatch(1, 1, 6, 8, 4, 0)]
    assert plan.micro_batches(1, 2) == [MicroBatch(1, -1, 4, 4, 4, 0)]
    short = BatchPlan(8, 2, 2, 9)
    assert short.micro_batches(1, 0) == [
        MicroBatch(1, 0, 8, 9, 1, 0),
        MicroBatch(1, 1, 8, 8, 1, 0),
    ]
    assert short.micro_batches(2, 1)[0].epoch == 1
    assert short.stop_of(short.micro_batches(1, 0)[1]) == 9, "no more than the batch has"


# Devices


class Pair(NamedTuple):
    x: Any
    y: Any


class Moves:
    """Something of the user's that moves itself."""

    def __init__(self) -> None:
        self.asked: Any = None

    def to(self, device: torch.device, *, non_blocking: bool) -> str:
        self.asked = (device, non_blocking)
        return "moved"


def test_every_container_keeps_its_form_on_the_way_to_a_device() -> None:
    meta, tensor, own = torch.device("meta"), torch.ones(2), Moves()
    moved = to_device(
        {"a": (tensor, 1), "b": [tensor], "c": Pair(tensor, "x"), "d": own, "e": None}, meta
    )
    assert [type(moved[key]) for key in "abc"] == [tuple, list, Pair]
    assert moved["a"][0].is_meta
    assert moved["a"][1] == 1
    assert moved["b"][0].is_meta
    assert moved["c"].x.is_meta
    assert moved["c"].y == "x"
    assert (moved["d"], moved["e"]) == ("moved", None)
    assert own.asked == (meta, True), "steps need not wait for it"
    assert not tensor.is_meta


# Digests


class Recorder:
    """What a digest is given."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []

    def update(self, part: Any) -> None:
        self.parts.append(bytes(part))


def given(sample: Any) -> tuple[list[bytes], bool]:
    recorder = Recorder()
    is_known = add(recorder, sample)
    return recorder.parts, is_known


def test_a_sample_is_told_by_its_type_its_form_and_its_content() -> None:
    assert given(5) == ([b"int", b"5"], True)
    assert given("a") == ([b"str", b"'a'"], True)
    assert given(b"xy") == ([b"bytes", b"xy"], True)
    assert given(bytearray(b"xy")) == ([b"bytearray", b"xy"], True)
    assert given(None) == ([b"NoneType"], True)
    assert given([1, None]) == ([b"list", b"int", b"1", b"NoneType"], True)
    assert given({"a": 1.5}) == ([b"dict", b"str", b"'a'", b"float", b"1.5"], True)
    assert given((True, 1j)) == ([b"tuple", b"bool", b"True", b"complex", b"1j"], True)
    tensor = torch.tensor([1, 2], dtype=torch.uint8)
    assert given(tensor) == ([b"Tensor", b"(torch.uint8, (2,))", b"\x01\x02"], True)
    array = np.array([1, 2], dtype=np.uint8)
    assert given(array) == ([b"ndarray", b"((2,), 2)", b"\x01\x02"], True)
    assert given(torch.ones(2).to_sparse()) == ([b"Tensor", b"(torch.float32, (2,))"], False)
    assert given(object()) == ([b"object"], False)
    assert given([object(), 5]) == ([b"list", b"object", b"int", b"5"], False)


def test_digests_are_those_of_every_release() -> None:
    """A checkpoint keeps them: a run that resumes with another release compares with them."""
    assert digest_of(5) == (1374679708948949129, True)
    assert digest_of({"x": torch.arange(3), "y": "text"}) == (6456329077650229566, True)
    assert chained(0, 1, 2) == 5349425249354526337
    assert chained(7, -1) == 252433776866159876
    assert _read_all(range(70)).after == Mark(70, 348496497394214018)


def _read_all(samples: Any, mark: Mark | None = None) -> Read:
    followed = ReadDigest(mark or Mark())
    list(followed.follow(iter(samples)))
    return followed.take()


def test_large_samples_are_hashed_at_even_distances(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest_module, "_HASHED_BYTES", 8)
    small, large = torch.arange(8, dtype=torch.uint8), torch.arange(9, dtype=torch.uint8)
    assert _lighter(small) is small
    shape, some = _lighter(large.view(3, 3))
    assert (tuple(shape), some.tolist()) == ((3, 3), [0, 2, 4, 6, 8])
    assert _lighter(torch.arange(4.0))[1].tolist() == [0.0, 2.0]
    assert _lighter(b"12345678") == b"12345678"
    assert _lighter(b"123456789") == [9, b"1234", b"6789"]
    assert _lighter({"a": large, "b": 1})["a"][1].tolist() == [0, 2, 4, 6, 8]
    assert _lighter((1, "x")) == [1, "x"]
    assert _lighter({3, 1}) == [1, 3]
    assert _lighter(SimpleNamespace(a=1)) == ["SimpleNamespace", {"a": 1}]
    sparse = torch.ones(20).to_sparse()
    assert _lighter(sparse) is sparse
    array = np.zeros(3)
    assert _lighter(array) is array
    empty = SimpleNamespace()
    assert _lighter(empty) is empty


def test_a_read_says_where_it_began_and_shows_its_first_samples() -> None:
    read = _read_all(range(20), Mark(3, 9))
    assert read.before == Mark(3, 9)
    assert read.after.position == 23
    assert read.shown == tuple(digest_of(n)[0] for n in range(MOST_SHOWN))
    assert MOST_SHOWN == 8
    assert (read.whole, read.is_known, read.worker) == (0, True, None)
    assert not read.is_end
    followed = ReadDigest(Mark())
    list(followed.follow(iter([object()])))
    first = followed.take(worker=2)
    assert (first.is_known, first.worker) == (False, 2)
    second = followed.take()
    assert (second.is_known, second.is_end) == (True, True)
    assert Read(Mark(), Mark()) == Read(Mark(0, 0), Mark(0, 0), (), 0, True, None)


@pytest.mark.parametrize(
    ("position", "is_linked"), [(255, True), (256, True), (257, False), (320, True), (321, False)]
)
def test_after_the_first_samples_every_64th_counts(position: int, is_linked: bool) -> None:
    one, other = (_read_all([sample], Mark(position, 1)).after for sample in (5, 6))
    assert (one.chain != other.chain) is is_linked
    assert (one.chain != 1) is is_linked


def test_a_whole_batch_is_chained_where_it_was_asked_for() -> None:
    followed = ReadDigest(Mark(257, 1))
    followed.hashes_all = True
    list(followed.follow(iter([5, 6])))
    read = followed.take()
    numbers = [digest_of(n)[0] for n in (5, 6)]
    assert read.whole == chained(chained(0, numbers[0]), numbers[1])
    assert read.shown == tuple(numbers)
    assert read.after == Mark(259, 1)


# Seeds


def drawn() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: S311


def test_a_seed_sets_every_stream_of_the_process() -> None:
    seed_data(7)
    first = drawn()
    drawn()
    seed_data(7)
    assert drawn() == first
    seed_data(8)
    assert all(one != other for one, other in zip(drawn(), first, strict=True))
    seed_data(1 << 40 | 7)
    assert drawn()[1] == first[1], "NumPy takes 32 bits"


def test_what_is_drawn_inside_changes_nothing_outside_even_if_it_fails() -> None:
    seed_data(7)
    expected = drawn()
    seed_data(7)
    with pytest.raises(ValueError, match="x"), undisturbed():
        drawn()
        raise ValueError("x")
    assert drawn() == expected


def test_a_models_seed_is_the_devices_too(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded: list[Any] = []
    monkeypatch.setattr(
        seeding,
        "accelerator_of",
        lambda device: SimpleNamespace(seed=lambda seed: seeded.append((device, seed))),
    )
    state = random.getstate()
    seed_model(5, torch.device("meta"))
    assert seeded == [(torch.device("meta"), 5)]
    first = torch.rand(())
    seed_model(5, torch.device("cpu"))
    assert len(seeded) == 1
    assert torch.equal(torch.rand(()), first)
    assert random.getstate() == state, "a model's dropout is no augmentation"


def test_seeds_of_turns_are_apart() -> None:
    stream = fold(42, DATA)
    seeds = {turn_seed(stream, step, index) for step in range(20) for index in range(-1, 20)}
    assert len(seeds) == 20 * 21
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    assert fold() == 0
    assert SAMPLER == 4


# Elastic feeds


class Numbers:
    """A dataset of its own indices; notes what is asked for."""

    def __init__(self, length: int = 20) -> None:
        self.length = length
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.asked.append(index)
        return index


def source(length: int = 20, **more: Any) -> Source:
    return Source(Numbers(length), length, shuffle=False, **more)


def test_a_steps_samples_are_dealt_to_whoever_is_there() -> None:
    feed = ElasticFeed(source(), BatchPlan(4, 2, 2, 20), seed=1)
    with pytest.raises(ValueError, match="needs to know its steps"):
        next(feed.steps(None, 1))
    steps = feed.steps(3, None)
    assert list(next(steps)) == []
    first = [(micro.index, batch.tolist()) for micro, batch in feed.deal(0, 2, 1)]
    assert first == [(1, [2, 3])]
    alone = [(micro.index, batch.tolist()) for micro, batch in feed.deal(1, 1, 0)]
    assert alone == [(0, [4, 5]), (1, [6, 7])]
    again = [batch.tolist() for _, batch in feed.deal(1, 1, 0)]
    assert again == [[4, 5], [6, 7]], "a step may be asked for a second time"
    on = [batch.tolist() for _, batch in feed.deal(2, 1, 0)]
    assert on == [[8, 9], [10, 11]]
    assert list(feed.deal(2, 3, 2)) == [], "turns without samples are left out"
    feed.steps_done = 3
    assert list(steps) == []


def test_a_dealt_feed_stands_where_its_loop_says() -> None:
    feed = ElasticFeed(source(), BatchPlan(4, 2, 2, 20), seed=1)
    assert feed.state_dict() == {"step": 0, "epoch": 0, "samples": 0}
    feed.load_state_dict({"step": 6, "epoch": 1, "samples": 6})
    assert feed.steps_done == 6
    assert feed.state_dict() == {"step": 6, "epoch": 1, "samples": 6}


def test_a_dealt_feed_reads_with_the_options_of_its_loader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[dict[str, Any]] = []

    def loader(dataset: Any, **options: Any) -> list[Any]:
        asked.append(options)
        return []

    monkeypatch.setattr(elastic_feed, "DataLoader", loader)
    feed = ElasticFeed(source(num_workers=2, prefetch_factor=5), BatchPlan(4, 2, 2, 20), seed=1)
    assert list(feed.deal(0, 3, 2)) == []
    assert asked[0]["num_workers"] == 2
    assert asked[0]["prefetch_factor"] == 5


def test_a_loader_of_a_seat_is_asked_for_its_turns_only() -> None:
    plan = BatchPlan(4, 2, 3, 6)
    assert own_turns(plan, 0, 2) == []
    assert len(own_turns(plan, 0, 1)) == 1
    order = _OrderFrom(plan, 1, 1, 4)
    assert len(order) == len(list(order)) == 3
    assert [micro.step for micro in order] == [1, 2, 3]


# Feeds


def test_a_map_feed_yields_a_ranks_turns_step_by_step() -> None:
    feed = MapFeed(source(10), BatchPlan(4, 1, 2, 10), rank=1, seed=1)
    with pytest.raises(ValueError, match="either total_steps or num_epochs is needed"):
        next(feed.steps(None, None))
    found = [[batch.tolist() for _, batch in turns] for turns in feed.steps(None, 1)]
    assert found == [[[2], [3]], [[6], [7]], [[8], [8]]]
    assert len(found) == 3
    assert feed.state_dict() == {"step": 3, "epoch": 1, "samples": 0}
    assert feed.sample_ids(1) == [6, 7]
    assert feed.sample_ids(2) == [], "turns without samples have none"
    feed.load_state_dict({"step": 1})
    assert feed.state_dict() == {"step": 1, "epoch": 0, "samples": 4}
    (turns,) = feed.steps(2, None)
    assert [(micro.step, micro.index, batch.tolist()) for micro, batch in turns] == [
        (1, 2, [6]),
        (1, 3, [7]),
    ]


def test_an_oldest_position_says_only_its_step() -> None:
    plan = BatchPlan(4, 1, 2, 10)
    assert position_in({"step": 4}, plan) == DataPosition(4, 1, 4)
    assert position_in({"step": 4, "epoch": 2, "samples": 3}, plan) == DataPosition(4, 2, 3)


def test_samples_are_read_under_the_seed_of_their_turn() -> None:
    class Draws(Numbers):
        def __getitem__(self, index: int) -> Any:
            return float(torch.rand(()))

    plan = BatchPlan(4, 2, 1, 20)
    micro = plan.micro_batches(3, 0)[1]
    keyed = KeyedDataset(Source(Draws(), 20, shuffle=False), plan, 0, seed=5)
    found = keyed.__getitems__(micro)
    torch.manual_seed(turn_seed(fold(5, DATA), 3, 1))
    assert found == [float(torch.rand(())) for _ in range(2)]
    quiet = KeyedDataset(Source(TensorDataset(torch.arange(20)), 20, shuffle=False), plan, 0, 5)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    assert [int(each[0]) for each in quiet.__getitems__(micro)] == [14, 15]
    assert torch.equal(torch.get_rng_state(), before), "tensors in memory draw nothing"


def test_batches_are_paired_with_what_was_asked_for() -> None:
    order = PlannedOrder(BatchPlan(4, 2, 1, 20), 0, range(1))
    asked = list(order)
    assert list(order.pair_with(["a", "b"])) == list(zip(asked, ["a", "b"], strict=True))


def test_ids_are_computed_for_a_stretch_of_steps() -> None:
    plan = BatchPlan(4096, 2048, 2, 1_000_000)
    ids = RankSampleIds(plan, 0, seed=3, shuffle=True)
    first = ids.ids(plan.micro_batches(0, 0)[0])
    assert len(ids._ids) == 4, "as many steps as have 8,192 samples"
    known = ids._ids
    ids.ids(plan.micro_batches(3, 0)[0])
    assert ids._ids is known
    ids.ids(plan.micro_batches(4, 0)[0])
    assert ids._ids is not known
    assert ids.ids(plan.micro_batches(0, 0)[0]) == first
    large = RankSampleIds(BatchPlan(40000, 20000, 1, 80000), 0, 3, shuffle=True)
    assert large._steps_ahead == 1
    idle = RankSampleIds(BatchPlan(2, 2, 2, 20), 1, 3, shuffle=True)
    assert idle._steps_ahead == 8192
    stream = RankSampleIds(BatchPlan(4, 2, 1, None), 0, 3, shuffle=True)
    with pytest.raises(ValueError, match="a stream has no ids"):
        stream.ids(MicroBatch(0, 0, 0, 2, 4, 0))


# Evaluation


def batches(feed: EvaluationFeed, *, in_lockstep: bool = False) -> list[tuple[Any, int]]:
    return [
        (each.batch.flatten().tolist(), each.num_samples)
        for each in feed.batches(in_lockstep=in_lockstep)
    ]


def test_every_sample_is_evaluated_once_and_ranks_keep_step() -> None:
    feeds = [EvaluationFeed(source(7), 2, rank, 3) for rank in range(3)]
    assert [batches(feed) for feed in feeds] == [
        [([0, 1], 2), ([6], 1)],
        [([2, 3], 2)],
        [([4, 5], 2)],
    ]
    assert [batches(feed, in_lockstep=True)[1:] for feed in feeds] == [
        [([6], 1)],
        [([0], 0)],
        [([0], 0)],
    ]
    assert feeds[0].length == 7
    assert not feeds[0].is_sharded


@pytest.mark.parametrize(("most", "found"), [(3, [2, 1]), (4, [2, 2]), (9, [2, 2, 2, 1])])
def test_only_the_first_samples_are_evaluated_where_that_is_asked_for(
    most: int, found: list[int]
) -> None:
    feed = EvaluationFeed(source(7), 2, 0, 1, max_samples=most)
    assert [count for _, count in batches(feed)] == found
    assert feed.length == 7


def test_a_sampler_decides_what_is_evaluated() -> None:
    chosen = Drawn(0, [5, 3, 1], 0, 3)
    feed = EvaluationFeed(source(7), 2, 0, 1, drawn=chosen)
    assert (batches(feed), feed.length) == ([([5, 3], 2), ([1], 1)], 3)
    by_batch = UserSampler(None, yields_batches=True, length=2)
    whole = Drawn(0, [[5, 3, 1], [2]], 0, 4)
    feed = EvaluationFeed(source(7, sampler=by_batch), 2, 0, 1, drawn=whole)
    assert batches(feed) == [([5, 3, 1], 3), ([2], 1)]
    feed = EvaluationFeed(source(7, sampler=by_batch), 2, 0, 1, max_samples=2, drawn=whole)
    assert batches(feed) == [([5, 3], 2)]
    feed = EvaluationFeed(source(7, sampler=by_batch), 2, 0, 1, max_samples=4, drawn=whole)
    assert batches(feed) == [([5, 3, 1], 3), ([2], 1)]


class Stream(IterableDataset[Any]):
    """Numbers up to a length."""

    def __init__(self, length: int, size: int = 0) -> None:
        self.length, self.size = length, size

    def __iter__(self) -> Iterator[Any]:
        for n in range(self.length):
            yield torch.full((self.size,), n) if self.size else torch.tensor(n)


def stream_source(length: int, size: int = 0, **more: Any) -> Source:
    collate = default_convert if size else default_collate
    return Source(
        Stream(length, size), None, shuffle=False, is_batched=bool(size), collate=collate, **more
    )


class Noted:
    """In place of a check with other ranks."""

    def __init__(self) -> None:
        self.notes: list[Any] = []

    def begin_epoch(self) -> None:
        self.notes.append("begins")

    def note(self, epoch: int, mark: Mark, read: Read) -> None:
        self.notes.append((epoch, mark.position, read.is_end, mark == read.after))

    def settle(self) -> None:
        self.notes.append("settled")


def test_of_a_stream_every_rank_keeps_its_own_batches() -> None:
    feeds = [EvaluationFeed(stream_source(7), 2, rank, 3) for rank in range(3)]
    assert [batches(feed) for feed in feeds] == [
        [([0, 1], 2), ([6], 1)],
        [([2, 3], 2)],
        [([4, 5], 2)],
    ]
    assert [batches(feed, in_lockstep=True) for feed in feeds] == [
        [([0, 1], 2), ([6], 1)],
        [([2, 3], 2), ([6], 0)],
        [([4, 5], 2), ([6], 0)],
    ]
    assert feeds[0].length is None


def test_ranks_compare_a_stream_after_every_round() -> None:
    checked: Any = Noted()
    feed = EvaluationFeed(stream_source(5), 2, 0, 2, check=checked)
    assert [count for _, count in batches(feed)] == [2, 1]
    assert checked.notes == [
        "begins",
        (0, 4, False, True),
        (0, 5, True, True),
    ]


def test_a_stream_is_read_up_to_the_most_and_a_ready_batch_is_not_cut() -> None:
    assert batches(EvaluationFeed(stream_source(7), 2, 0, 1, max_samples=3)) == [
        ([0, 1], 2),
        ([2], 1),
    ]
    ready = EvaluationFeed(stream_source(3, size=2), 2, 0, 1, max_samples=5)
    assert batches(ready) == [([0, 0], 2), ([1, 1], 2)]
    whole = EvaluationFeed(stream_source(3, size=2), 2, 0, 1, max_samples=6)
    assert [count for _, count in batches(whole)] == [2, 2, 2]
    assert batches(EvaluationFeed(stream_source(0), 2, 0, 1), in_lockstep=True) == []


def test_a_rank_with_a_part_of_its_own_reads_all_of_it_and_keeps_the_others_company() -> None:
    sums: list[int] = []
    others = iter([2, 2, 1, 0])

    def sum_over_ranks(own: int) -> int:
        sums.append(own)
        return own + next(others)

    shards = Shards("already_sharded", sum_over_ranks)
    checked: Any = Noted()
    feed = EvaluationFeed(stream_source(3), 2, 1, 2, shards=shards, check=checked)
    assert feed.is_sharded
    assert batches(feed, in_lockstep=True) == [([0, 1], 2), ([2], 1), ([0, 1], 0)]
    assert sums == [2, 1, 0, 0]
    assert checked.notes == ["begins", (0, 2, False, True)], "what it began with"
    alone = EvaluationFeed(stream_source(5), 2, 1, 2, max_samples=5, shards=shards)
    assert batches(alone) == [([0, 1], 2)], "rank 1 of two has two of five samples"


def test_a_rank_asks_for_its_own_part_of_as_many_as_there_are_ranks() -> None:
    asked: list[tuple[int, int]] = []

    class Parts(Stream):
        def shard(self, num_shards: int, index: int) -> Stream:
            asked.append((num_shards, index))
            return Stream(1)

    made = Source(Parts(9), None, shuffle=False)
    feed = EvaluationFeed(made, 2, 1, 3, shards=Shards("own_shard", int))
    assert batches(feed) == [([0], 1)]
    assert asked == [(3, 1)]


# Fingerprints


def test_a_fingerprint_is_of_the_content_and_of_nothing_else() -> None:
    one, other = [1, 2, 3], [1, 2, 4]
    first = content(source_from(one, Data()))
    assert first == content(source_from(list(one), Data()))
    assert first != content(source_from(other, Data()))
    assert first is not None
    assert len(first) == 16
    assert content(source_from(iter(one), Data())) is None
    single = content(source_from([7], Data()))
    assert single is not None


def test_an_error_of_a_sample_names_it() -> None:
    class Broken(Numbers):
        def __getitem__(self, index: int) -> int:
            if index == 3:
                raise ValueError("no")
            return index

    for call, who in (
        (lambda: read(Broken(), [1, 3, 5]), "Broken.__getitem__(3)"),
        (lambda: read_one(Broken(), 3), "Broken.__getitem__(3)"),
    ):
        with pytest.raises(ValueError, match="^no") as caught:
            call()
        assert caught.value.__notes__ == [f"raised by {who}"]
    assert read(Broken(), [1, 2]) == [1, 2]
    assert read_one(Broken(), 2) == 2


def test_a_dataset_that_reads_many_at_once_is_asked_for_many() -> None:
    class Many:
        def __getitems__(self, ids: Any) -> list[int]:
            if 9 in ids:
                raise ValueError("no")
            return [10 * i for i in ids]

    assert read(Many(), [1, 2]) == [10, 20]
    with pytest.raises(ValueError, match="^no") as caught:
        read(Many(), range(8, 10))
    assert caught.value.__notes__ == ["raised by Many.__getitems__([8, 9])"]


def test_errors_of_collating_and_of_a_stream_say_how_far_it_had_come() -> None:
    def pad(samples: list[Any]) -> Any:
        raise ValueError("no")

    with pytest.raises(ValueError, match="^no") as caught:
        Collated(pad)([1, 2])
    (note,) = caught.value.__notes__
    assert note.endswith(".pad (collate), given 2 samples,")

    class Pads:
        def __call__(self, samples: list[Any]) -> Any:
            raise ValueError("no")

    with pytest.raises(ValueError, match="^no") as caught:
        Collated(Pads())([])
    assert caught.value.__notes__ == ["raised by Pads (collate), given 0 samples,"]

    class Breaks(IterableDataset[Any]):
        def __iter__(self) -> Iterator[int]:
            yield from (1, 2)
            raise ValueError("no")

    with pytest.raises(ValueError, match="^no") as caught:
        list(in_order(Breaks()))
    assert caught.value.__notes__ == ["raised by Breaks.__iter__, after 2 samples"]


# What ranks tell each other


def standing(**changes: Any) -> _Standing:
    known: dict[str, Any] = {
        "dp_index": 1,
        "epoch": 2,
        "mark": Mark(3, 4),
        "is_end": False,
        "is_known": True,
        "shown": (5, 6),
    }
    return _Standing(**{**known, **changes})


def test_what_a_rank_tells_is_what_the_next_one_hears() -> None:
    for told in (standing(), standing(is_end=True, is_known=False, shown=tuple(range(8)))):
        numbers = told.numbers()
        assert len(numbers) == 16
        assert _Standing.of(numbers) == told
    assert standing().numbers() == [1, 2, 3, 4, 0, 1, 2, 0, 5, 6, 0, 0, 0, 0, 0, 0]
    assert standing().place == (2, Mark(3, 4), False)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"is_end": True, "mark": Mark(9, 4)},
            "rank 0's has ended after 9 samples and rank 1's goes on",
        ),
        (
            {"mark": Mark(9, 4)},
            "rank 1 has read 3 samples of epoch 2 and rank 0 9 of epoch 2",
        ),
        ({"epoch": 5}, "rank 1 has read 3 samples of epoch 2 and rank 0 3 of epoch 5"),
        ({"shown": (6, 5)}, "rank 1 reads the samples of rank 0 in another order"),
        (
            {"shown": (7, 8)},
            "rank 1 reads other samples than rank 0: the dataset gives each rank a part of its "
            "own, or shuffles with random numbers of its own",
        ),
    ],
)
def test_how_ranks_differ_is_said(changes: dict[str, Any], text: str) -> None:
    assert _how_they_differ(standing(), standing(**changes), "rank 1", "rank 0") == text


def test_who_has_ended_is_named_whoever_it_is() -> None:
    text = _how_they_differ(standing(is_end=True), standing(), "rank 1", "rank 0")
    assert text == "rank 1's has ended after 3 samples and rank 0's goes on"


def test_a_stream_that_differs_is_answered_with_what_to_do() -> None:
    assert splits_by(object()) == ""
    assert splits_by(SimpleNamespace(_distributed=object())) == "split_dataset_by_node"
    assert splits_by(SimpleNamespace(pipeline="split_by_node")) == ""
    assert remedy_for(SimpleNamespace(_distributed=object())) == (
        "it was split by split_dataset_by_node: pass it unsplit, or set "
        "data.iterable_sharding=already_sharded"
    )
    assert remedy_for(object()) == (
        "seed its shuffling alike everywhere (by set_epoch(epoch), or from torch's, Python's and "
        "NumPy's own generators, which follow the run's seed); if it gives each rank a part of its "
        "own, set data.iterable_sharding=already_sharded"
    )


class Ring:
    """Neighbours that say what they are given to say."""

    before = 0

    def __init__(self, *answers: _Standing) -> None:
        self.answers = list(answers)
        self.told: list[list[int]] = []
        self.num_heard = 0

    def tell(self, numbers: list[int]) -> None:
        self.told.append(numbers)

    def hear(self) -> list[int] | None:
        if self.num_heard == len(self.told):
            return None
        self.num_heard += 1
        return self.answers.pop(0).numbers() if self.answers else self.told[-1]


def check(ring: Any, *, rank: int = 1, shares_out: bool = False) -> RankCheck:
    return RankCheck(ring, rank, 1, Stream(1), "own_shard", shares_out)


def noted(checked: RankCheck, at: _Standing) -> None:
    before = at.mark if at.is_end else Mark()
    checked.note(at.epoch, at.mark, Read(before, at.mark, at.shown, is_known=at.is_known))


def test_one_rank_alone_tells_nobody() -> None:
    checked = check(None)
    noted(checked, standing())
    checked.settle()


def test_a_rank_tells_where_it_stands_and_a_stream_that_differs_is_refused() -> None:
    ring = Ring(standing())
    noted(check(ring), standing())
    assert ring.told == [standing().numbers()]
    with pytest.raises(ConfigError) as caught:
        noted(check(Ring(standing(mark=Mark(9, 9)))), standing())
    assert str(caught.value).startswith(
        "data = Stream: every rank must read the same stream, but rank 1 has read 3 samples of "
        "epoch 2 and rank 0 9 of epoch 2; seed its shuffling alike everywhere"
    )


def test_a_part_of_its_own_may_differ_and_is_not_looked_at_after_the_first_steps() -> None:
    other = standing(dp_index=0, shown=(8, 9), mark=Mark(3, 7))
    noted(check(Ring(other), shares_out=True), standing())
    checked = check(Ring(other, other, standing(dp_index=0)), shares_out=True)
    for _ in range(3):
        noted(checked, standing())
    checked.settle()
    with pytest.raises(ConfigError, match="reads the same samples as rank 0"):
        noted(check(Ring(standing(dp_index=0)), shares_out=True), standing())


def test_an_end_is_settled_at_once() -> None:
    ring = Ring()
    checked = check(ring)
    heard = []
    for is_end in (False, False, False, True):
        noted(checked, standing(is_end=is_end))
        heard.append(ring.num_heard)
    assert heard == [1, 2, 2, 4]


def test_only_rank_0_speaks_of_what_it_cannot_tell_apart(recwarn: pytest.WarningsRecorder) -> None:
    noted(check(Ring(), rank=1), standing(is_known=False))
    assert len(recwarn) == 0
    noted(check(Ring(), rank=0), standing(is_known=False))
    assert [str(each.message) for each in recwarn] == [
        "the samples of Stream hold objects whose content is not known here: whether all ranks "
        "read the same samples is judged by their number alone; let the stream yield tensors, "
        "arrays, text and numbers in dicts, lists or tuples"
    ]


# Ray


class Rows:
    __module__ = "ray.data.dataset"

    def __init__(self) -> None:
        self.context = SimpleNamespace(execution_options=SimpleNamespace(preserve_order=False))

    def iter_rows(self) -> list[dict[str, int]]:
        return [{"a": 1}, {"a": 2}]


def test_rows_of_ray_come_in_their_order() -> None:
    rows = Rows()
    assert is_ray_dataset(rows)
    assert not is_ray_dataset([1])
    assert not is_ray_dataset(type("Other", (), {"__module__": "ray.data.x"})())
    assert not is_ray_dataset(SimpleNamespace(iter_rows=1))
    stream = RayRows(rows)
    assert list(stream) == [{"a": 1}, {"a": 2}]
    assert rows.context.execution_options.preserve_order is True
    made = source_from(Rows(), Data())
    assert isinstance(made.dataset, RayRows)
    assert made.length is None


# Ready batches


def test_a_sample_out_of_a_batch_has_its_form() -> None:
    tensor = torch.arange(4).view(2, 2)
    assert first_sample(tensor).tolist() == [0, 1]
    found = first_sample({"x": tensor, "y": ["a", "b"], "z": (tensor, [1, 2])})
    assert found["x"].tolist() == [0, 1]
    assert found["y"] == "a"
    assert isinstance(found["z"], tuple)
    assert found["z"][1] == 1
    pair = first_sample(Pair(tensor, tensor))
    assert isinstance(pair, Pair)
    assert pair.y.tolist() == [0, 1]


def test_the_size_of_a_batch_is_that_of_the_first_thing_that_has_one() -> None:
    assert num_samples_in({"a": torch.tensor(1), "b": torch.ones(3, 2)}) == 3
    assert num_samples_in(["x", "y"]) == 2
    assert num_samples_in([]) == 0
    assert num_samples_in([["x", "y", "z"], torch.ones(2)]) == 3
    with pytest.raises(ConfigError) as caught:
        num_samples_in({"a": 5})
    assert str(caught.value) == (
        "data.batched = True: a batch of type dict holds nothing whose first dimension counts "
        "samples; let the stream yield tensors, arrays or lists in dicts, lists or tuples"
    )


# Samplers


class Order:
    """The ids it is given; notes the epochs it is told of."""

    def __init__(self, *ids: Any, length: int | None = None) -> None:
        self.ids, self.length = list(ids), length
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __len__(self) -> int:
        return len(self.ids) if self.length is None else self.length

    def __iter__(self) -> Iterator[Any]:
        return iter(self.ids)


def test_a_sampler_is_drawn_under_a_seed_of_its_epoch() -> None:
    class Draws(Order):
        def __iter__(self) -> Iterator[int]:
            return iter(torch.randperm(3).tolist())

    sampler = UserSampler.of(Draws(0, 1, 2), yields_batches=False)
    before = torch.get_rng_state()
    found = sampler.draw(5, 2)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(fold(5, SAMPLER, 2))
    assert found.items == torch.randperm(3).tolist()
    assert (found.epoch, found.num_ids) == (2, 3)
    assert sampler.sampler.epochs == [2]
    assert found.digest == digest_of(list(found.items))[0]


def test_ids_are_plain_and_batches_lists_of_them() -> None:
    ids = UserSampler.of(Order(torch.tensor(1), np.int64(2), "key"), yields_batches=False)
    assert ids.draw(0, 0).items == [1, 2, "key"]
    inner = Order(1)
    outer = Order((torch.tensor(1), 2), [3])
    outer.sampler = inner  # type: ignore[attr-defined]
    whole = UserSampler.of(outer, yields_batches=True).draw(0, 4)
    assert whole.items == [[1, 2], [3]]
    assert whole.num_ids == 3
    assert (outer.epochs, inner.epochs) == ([4], [4]), "the one inside is told, too"
    assert UserSampler(None, yields_batches=True, length=2).largest(whole) == 2


def test_ids_that_cannot_be_told_apart_are_counted() -> None:
    things = UserSampler.of(Order(object(), object()), yields_batches=False)
    assert things.draw(0, 0).digest == chained(0, 2)


@pytest.mark.parametrize(
    ("sampler", "yields_batches", "text"),
    [
        (
            iter([1]),
            False,
            "does not say how long an epoch is; give it a __len__: the number of ids it yields",
        ),
        (
            Order(),
            True,
            "does not say how long an epoch is; give it a __len__: the number of batches it yields",
        ),
    ],
)
def test_a_sampler_without_a_length_is_refused(
    sampler: Any, yields_batches: bool, text: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        UserSampler.of(sampler, yields_batches=yields_batches)
    assert str(caught.value) == f"DataLoader sampler = {type(sampler).__name__}: {text}"


@pytest.mark.parametrize(("yields_batches", "what"), [(False, "ids"), (True, "batches")])
def test_a_length_that_is_not_true_is_refused(yields_batches: bool, what: str) -> None:
    sampler = UserSampler.of(Order([1], [2], length=3), yields_batches=yields_batches)
    with pytest.raises(ConfigError) as caught:
        sampler.draw(0, 5)
    assert str(caught.value) == (
        f"DataLoader sampler = Order: yields 2 {what} in epoch 5, and its len() is 3; let len() "
        "be what it yields, in every epoch"
    )


def test_a_sampler_that_draws_from_elsewhere_or_fails_is_named() -> None:
    class Moody(Order):
        def __iter__(self) -> Iterator[int]:
            self.ids[0] += 1
            return iter(self.ids)

    with pytest.raises(ConfigError) as caught:
        UserSampler.of(Moody(1, 2), yields_batches=False).check_repeatable(0)
    assert str(caught.value) == (
        "DataLoader sampler = Moody: draws random numbers that do not follow the run's seed: drawn "
        "twice, an epoch has other ids, and no rank or resumed run could know them; leave out its "
        "generator=, or draw from torch's, Python's or NumPy's own generators, or from one that is "
        "seeded in __iter__ by set_epoch(epoch)"
    )

    class Broken(Order):
        def __iter__(self) -> Iterator[int]:
            raise ValueError("no")

    with pytest.raises(ValueError, match="^no") as broken:
        UserSampler.of(Broken(1), yields_batches=False).draw(0, 3)
    assert broken.value.__notes__ == ["raised by Broken.__iter__ (sampler), in epoch 3,"]
    steady = UserSampler.of(Order(1, 2), yields_batches=False)
    assert steady.check_repeatable(0).epoch == 0


# Sampled feeds


class Talk:
    """The rank before, which drew what it is given."""

    before = 3

    def __init__(self, heard: Any = None) -> None:
        self.heard = heard
        self.told: list[list[int]] = []

    def tell(self, numbers: list[int]) -> None:
        self.told.append(numbers)

    def hear(self) -> Any:
        return self.told[-1] if self.heard is None else self.heard


def sampled(
    sampler: Any, plan: BatchPlan, *, rank: int = 0, yields_batches: bool = False, talk: Any = None
) -> SampledFeed:
    made = UserSampler.of(sampler, yields_batches=yields_batches)
    return SampledFeed(source(20, sampler=made), made, plan, rank, 1, talk)


def test_a_samplers_ids_are_cut_into_steps_as_any_datasets() -> None:
    feed = sampled(Order(9, 8, 7, 6, 5), BatchPlan(4, 2, 2, 5), rank=1)
    assert [picked.ids for picked in feed.picked(0)] == [[7, 6]]
    assert feed.sample_ids(0) == [7, 6]
    assert [picked.ids for picked in feed.picked(1)] == [[5]], "a turn without samples"
    assert feed.sample_ids(1) == []
    found = [[batch.tolist() for _, batch in turns] for turns in feed.steps(3, None)]
    assert found == [[[7, 6]], [[5]], [[7, 6]]]


def test_batches_of_a_sampler_are_micro_batches_weighed_by_their_true_size() -> None:
    plan = BatchPlan(6, 3, 2, 9)
    sampler = Order([1, 2, 3], [4], [5, 6])
    first = sampled(sampler, plan, yields_batches=True)
    second = sampled(sampler, plan, rank=1, yields_batches=True)
    first.check_size()
    assert first.picked(0) == [Picked(MicroBatch(0, 0, 0, 3, 4, 0), [1, 2, 3])]
    assert second.picked(0) == [Picked(MicroBatch(0, 1, 3, 4, 4, 0), [4])]
    assert first.picked(1) == [Picked(MicroBatch(1, 0, 4, 6, 2, 0), [5, 6])]
    assert second.picked(1) == [Picked(MicroBatch(1, -1, 0, 0, 2, 0), [5, 6])]
    assert first.sample_ids(0) == [1, 2, 3]
    assert second.sample_ids(0) == [], "batches differ in size, and a place would mislead"


@pytest.mark.parametrize(
    ("epoch", "size", "is_refused"),
    [(0, 2, True), (0, 4, True), (1, 2, False), (1, 4, True), (1, 3, False)],
)
def test_the_largest_batch_must_be_the_micro_batch(epoch: int, size: int, is_refused: bool) -> None:
    feed = sampled(Order([1, 2, 3]), BatchPlan(3, 3, 1, 3), yields_batches=True)
    found = Drawn(epoch, [[0] * size], 0, size)
    if not is_refused:
        feed._check_size(found)
        return
    with pytest.raises(ConfigError) as caught:
        feed._check_size(found)
    assert str(caught.value) == (
        f"DataLoader sampler = Order: yields batches of up to {size} ids, each is a micro-batch, "
        f"and micro_batch_size is 3; set micro_batch_size={size}"
    )


def test_ranks_compare_what_they_have_drawn_at_every_epochs_first_step() -> None:
    talk = Talk()
    feed = sampled(Order(3, 2, 1), BatchPlan(2, 2, 1, 3), talk=talk)
    for turns in feed.steps(4, None):
        list(turns)
    digest = digest_of([3, 2, 1])[0]
    assert talk.told == [[0, 3, digest], [1, 3, digest]]
    other = sampled(Order(3, 2, 1), BatchPlan(2, 2, 1, 3), talk=Talk([0, 3, 5]))
    with pytest.raises(ConfigError) as caught:
        next(other.steps(1, None))
    assert str(caught.value) == (
        "DataLoader sampler = Order: draws other ids in epoch 0 than that of rank 3; let it yield "
        "the ids of all ranks, whatever the rank: Drivetrain shares them out; and let it draw from "
        "torch's, Python's or NumPy's own generators"
    )


def test_an_epoch_is_drawn_once_and_two_are_kept() -> None:
    sampler = Order(3, 2, 1)
    feed = sampled(sampler, BatchPlan(2, 2, 1, 3))
    sampler.epochs.clear()
    for epoch in (0, 1, 1, 2, 2):
        assert feed.drawn(epoch).epoch == epoch
    assert sampler.epochs == [1, 2]
    assert set(feed._drawn) == {1, 2}


def test_a_sampled_feed_knows_whether_it_resumes_with_what_it_was_saved() -> None:
    plan = BatchPlan(2, 2, 1, 3)
    feed = sampled(Order(3, 2, 1), plan)
    first = feed.first.digest
    assert feed.state_dict() == {
        "step": 0,
        "epoch": 0,
        "samples": 0,
        "drawn": None,
        "first_drawn": first,
    }
    next(feed.steps(3, None))
    state = feed.state_dict()
    assert (state["samples"], state["drawn"]) == (2, first)
    same = sampled(Order(3, 2, 1), plan)
    same.load_state_dict(state)
    assert same.state_dict() == state
    with pytest.raises(ConfigError) as caught:
        sampled(Order(3, 2, 1), plan).load_state_dict({**state, "drawn": 5})
    assert str(caught.value) == (
        "DataLoader sampler = Order: draws other ids in epoch 0 than before the run was saved; "
        "resume with the sampler, the weights and the data the run was started with"
    )
    another = sampled(Order(1, 2, 3), plan)
    another.load_state_dict(state)
    assert another.state_dict()["step"] == 1, "another sampler was accepted by name"


def test_picked_ids_are_read_under_the_seed_of_their_turn() -> None:
    class Draws(Numbers):
        def __getitem__(self, index: int) -> Any:
            return index, float(torch.rand(()))

    plan = BatchPlan(4, 2, 1, 20)
    keyed = PickedDataset(Source(Draws(), 20, shuffle=False), plan, 0, seed=5)
    (found,) = keyed.__getitems__(Picked(MicroBatch(3, 1, 0, 1, 4, 0), [7]))
    torch.manual_seed(turn_seed(fold(5, DATA), 3, 1))
    assert found == (7, float(torch.rand(())))


# Sources


def test_a_dataset_takes_its_settings_from_the_config() -> None:
    config = Data(shuffle=False, num_workers=3, prefetch_factor=5, pin_memory=True)
    made = source_from([1, 2], config)
    assert (made.length, made.shuffle, made.num_workers, made.prefetch_factor) == (2, False, 3, 5)
    assert (made.pin_memory, made.is_batched, made.sampler) == (True, False, None)
    assert made.collate is default_collate
    assert source_from([1], Data()).pin_memory is None
    assert source_from([1], Data()).settled(can_pin=True).pin_memory is True
    assert made.settled(can_pin=False) is made
    ready = source_from(Stream(3), Data(batched=True))
    assert (ready.is_batched, ready.collate) == (True, default_convert)


def test_a_loader_brings_its_own_settings() -> None:
    def collate(samples: list[Any]) -> Any:
        return samples

    def begin(worker: int) -> None:
        return None

    loader: DataLoader[Any] = DataLoader(
        TensorDataset(torch.ones(4)),
        batch_size=2,
        shuffle=True,
        num_workers=1,
        prefetch_factor=7,
        collate_fn=collate,
        worker_init_fn=begin,
        multiprocessing_context="spawn",
    )
    made = source_from(loader, Data(shuffle=False, num_workers=2))
    assert (made.shuffle, made.num_workers, made.prefetch_factor) == (True, 2, 7)
    assert (made.collate, made.worker_init_fn) == (collate, begin)
    options = made.loader_options
    assert {key: options[key] for key in ("num_workers", "pin_memory", "prefetch_factor")} == {
        "num_workers": 2,
        "pin_memory": False,
        "prefetch_factor": 7,
    }
    assert options["worker_init_fn"] is begin
    assert options["multiprocessing_context"] is loader.multiprocessing_context
    assert isinstance(options["generator"], torch.Generator)
    alone = source_from([1], Data()).loader_options
    assert set(alone) == {"num_workers", "pin_memory", "generator"}
    plain: DataLoader[Any] = DataLoader([1, 2])  # type: ignore[arg-type]
    made = source_from(plain, Data(prefetch_factor=3))
    assert (made.prefetch_factor, made.shuffle, made.collate) == (3, False, default_collate)
    assert made.pin_memory is None


@pytest.mark.parametrize(
    ("sampler", "order"),
    [
        (RandomSampler([1, 2, 3]), True),
        (SequentialSampler([1, 2, 3]), False),
        (RandomSampler([1, 2, 3], replacement=True), None),
        (RandomSampler([1, 2, 3], num_samples=2), None),
        (WeightedRandomSampler([0.5, 0.5, 1.0], 3), None),
        (type("RandomSampler", (Order,), {})(1, 2, 3), None),
    ],
)
def test_a_sampler_that_only_shuffles_is_replaced_and_another_is_kept(
    sampler: Any, order: bool | None
) -> None:
    loader: DataLoader[Any] = DataLoader([1, 2, 3], sampler=sampler, batch_size=1)  # type: ignore[arg-type]
    made = source_from(loader, Data())
    assert made.shuffle is (order is True)
    assert (made.sampler is None) is (order is not None)
    if made.sampler is not None:
        assert made.sampler.sampler is sampler
        assert not made.sampler.yields_batches
        assert made.epoch_length(4) == len(sampler)


def test_a_batch_sampler_yields_micro_batches_and_no_batching_is_refused() -> None:
    batch_sampler = BatchSampler(range(6), 4, drop_last=False)
    made = source_from(DataLoader(range(6), batch_sampler=batch_sampler), Data())  # type: ignore[arg-type]
    assert made.sampler is not None
    assert made.sampler.yields_batches
    assert made.epoch_length(4) == 8, "a batch counts as a full one"
    assert source_from([1, 2], Data()).epoch_length(4) == 2
    with pytest.raises(ConfigError) as caught:
        source_from(DataLoader([1, 2], batch_size=None), Data())  # type: ignore[arg-type]
    assert str(caught.value) == (
        "DataLoader batch_size = None: asks the dataset for one thing at a time, which reaches the "
        "model as it is; leave it out; for ready batches pass a stream of them"
    )


@pytest.mark.parametrize(
    ("batch_size", "batched", "is_batched"),
    [
        (2, "auto", False),
        (None, "auto", True),
        (None, True, True),
        (None, False, False),
        (2, False, False),
    ],
)
def test_a_streams_loader_without_a_batch_size_yields_ready_batches(
    batch_size: int | None, batched: Any, is_batched: bool
) -> None:
    loader: DataLoader[Any] = DataLoader(Stream(4), batch_size=batch_size)
    made = source_from(loader, Data(batched=batched))
    assert made.is_batched is is_batched
    assert made.collate is (default_convert if is_batched else default_collate)
    assert (made.length, made.shuffle, made.sampler) == (None, False, None)


def test_what_cannot_be_read_as_data_is_refused_by_its_name() -> None:
    with pytest.raises(ConfigError) as caught:
        source_from(DataLoader(Stream(4), batch_size=2), Data(batched=True))
    assert str(caught.value) == (
        "DataLoader batch_size = 2: would put ready batches together (data.batched); use "
        "batch_size=None"
    )
    with pytest.raises(ConfigError) as caught:
        source_from(5, Data(), "val")
    assert str(caught.value) == (
        "val = int: neither a dataset nor something to iterate over; pass a Dataset, a DataLoader "
        "or an iterable"
    )
    with pytest.raises(ConfigError) as caught:
        source_from([], Data(), "val")
    assert str(caught.value) == "val: has no samples; pass a dataset with at least one"
    several = "holds several sets of data, where one belongs; join them (torch.utils.data.Concat"
    for data in ({"a": [1]}, [TensorDataset(torch.ones(1))], {0: TensorDataset(torch.ones(1))}):
        with pytest.raises(ConfigError) as caught:
            source_from(data, Data())
        assert str(caught.value).startswith(f"data = {type(data).__name__}: {several}")
    assert source_from({0: 5, 1: 6}, Data()).length == 2
    refuse_one_pass([1], "val")
    refuse_one_pass(Stream(1), "val")
    with pytest.raises(ConfigError) as caught:
        refuse_one_pass(iter([1]), "val")
    assert str(caught.value) == (
        "val = list_iterator: can be read once only, and every evaluation reads it from the "
        "beginning; pass a dataset, a DataLoader, or an object whose __iter__ begins anew"
    )


def test_a_pipeline_that_may_yield_either_must_be_told() -> None:
    class Piped(Stream):
        def __init__(self) -> None:
            super().__init__(1)
            self.pipeline: list[Any] = [DataLoader(Stream(1))]

    with pytest.raises(ConfigError) as caught:
        source_from(Piped(), Data(), "val")
    assert str(caught.value) == (
        "val = Piped: may yield samples or ready batches, and which it is cannot be told; pass the "
        "dataset itself, or set data.batched to true or false"
    )
    assert source_from(Piped(), Data(batched=True)).is_batched is True
    assert source_from(Piped(), Data(batched=False)).is_batched is False


def test_what_is_looked_at_is_the_first_and_the_largest() -> None:
    samples = [torch.ones(n) for n in (2, 5, 3)]
    made = source_from(samples, Data())
    assert [len(each) for each in made.first(2)] == [2, 5]
    assert len(made.first(9)) == 3
    assert made.batch_of_largest(2).shape == (2, 5)
    late = source_from([torch.ones(1)] * 64 + [torch.ones(9)], Data())
    assert late.batch_of_largest(1).shape == (1, 1), "of the first 64"
    stream = source_from(Stream(5), Data())
    assert [int(each) for each in stream.first(2)] == [0, 1]
    assert stream.first_batch(3).tolist() == [0, 1, 2]
    ready = stream_source(3, size=2)
    assert ready.first_batch(9).tolist() == [0, 0]
    assert ready.batch_of_largest(3).tolist() == [0, 0, 0]
    nested = source_from(
        [{"a": [torch.ones(2)], "b": "text"}, {"a": [torch.ones(1)], "b": "x"}], Data()
    )
    assert nested.batch_of_largest(1)["a"][0].shape == (1, 2)


def test_only_tensors_in_memory_are_known_to_draw_nothing() -> None:
    tensors = TensorDataset(torch.ones(2))
    assert source_from(tensors, Data()).draws_nothing
    assert source_from([1], Data()).draws_nothing
    assert source_from(Subset(tensors, [0]), Data()).draws_nothing
    assert not source_from(Subset(Numbers(), [0]), Data()).draws_nothing  # type: ignore[arg-type]
    assert not source_from(Numbers(), Data()).draws_nothing
    own: DataLoader[Any] = DataLoader(tensors, collate_fn=list)
    assert not source_from(own, Data()).draws_nothing
    assert is_stream(Stream(1))
    assert not is_stream(Numbers())
    assert not is_stream(5)


# Shards and loader processes


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


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """This process as the second of three loader processes."""
    made = WorkerInfo(id=1, num_workers=3, seed=7, dataset=Stream(1))
    monkeypatch.setattr(worker_module, "_worker_info", made)
    return made


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
    with pytest.raises(ConfigError, match="asks for the loader process's seed and not how many"):
        watched.splits_itself()


def test_without_loader_processes_nothing_splits() -> None:
    watched = WatchedWorkers()
    assert (watched.id, watched.num_workers, watched.splits_itself()) == (0, 1, False)


# Streams


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
    with pytest.raises(ConfigError, match="does not give again what it gave before"):
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
        "global_batch_size = 4: was 2; where shards, or ready batches, of a stream stand is "
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
            "the state_dict of Stateful does not lead back to where the run was saved (a shuffle "
            "buffer loses its contents): the stream is read again up to there"
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
        "its shuffling alike in every process (set_epoch(epoch), or torch's, Python's and NumPy's "
        "own generators, which follow the run's seed), or use data.num_workers=0"
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
    with pytest.raises(ConfigError, match="does not give again what it gave before"):
        taken(other, 4)
    shorter = feed(3)
    shorter.load_state_dict(state)
    shorter.own_state = own
    with pytest.raises(ConfigError, match="has 3 samples where the run had used 4"):
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

"""What decides a run's numbers: known in a few words, and the same on all ranks."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, TensorDataset

from drivetrain.checkpoint.contract import Contract, ContractChanged
from drivetrain.config.schema import Data
from drivetrain.core.errors import ConfigError, WorkerFailure
from drivetrain.data.batches import BatchPlan, DataPosition
from drivetrain.data.feed import MapFeed
from drivetrain.data.fingerprint import content
from drivetrain.data.rank_sample_ids import RankSampleIds
from drivetrain.data.sources import source_from
from drivetrain.data.stream import StreamFeed
from drivetrain.record.run_directory import RunDirectory
from drivetrain.testing import run_ranks
from tests.resume.training import Setup, train

sizes = st.integers(1, 30)


@settings(max_examples=50)
@given(length=st.integers(1, 60), before=sizes, after=sizes, steps=st.integers(0, 9))
def test_another_batch_size_goes_on_at_the_next_sample(
    length: int, before: int, after: int, steps: int
) -> None:
    old = BatchPlan(before, 1, 1, length)
    new = BatchPlan(after, 1, 1, length).going_on_from(old.position(steps))
    last = new.end_of(max(new.start.epoch, old.position(steps).epoch) + 1)
    used = Counter([*_ids(old, range(steps)), *_ids(new, range(steps, last))])
    assert set(used) == set(range(length))
    assert set(used.values()) == {new.position(last).epoch}, "each sample once in every epoch"


def _ids(plan: BatchPlan, steps: range) -> list[int]:
    ids = RankSampleIds(plan, 0, 42, shuffle=True)
    turns = (micro for step in steps for micro in plan.micro_batches(step, 0))
    return [i for micro in turns if micro.num_samples for i in ids.ids(micro)]


def test_the_same_batch_size_changes_nothing() -> None:
    plan = BatchPlan(8, 4, 2, 21)
    assert all(plan.going_on_from(plan.position(step)) is plan for step in range(12))


def test_data_that_has_shrunk_begins_the_next_epoch() -> None:
    plan = BatchPlan(4, 4, 1, 10).going_on_from(DataPosition(step=5, epoch=0, samples=20))
    assert plan.position(5) == DataPosition(5, 1, 0)


@pytest.mark.parametrize("after", [2, 3, 8])
def test_a_stream_goes_on_at_the_next_sample(after: int) -> None:
    source = source_from(_Counting(), Data())
    first = StreamFeed(source, BatchPlan(4, 1, 1, None), 0, 42)
    seen = _read(first, 3)
    second = StreamFeed(source, BatchPlan(after, 1, 1, None), 0, 42)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    rest = _read(second, None)
    assert seen + rest == list(range(24))
    third = StreamFeed(source, BatchPlan(after, 1, 1, None), 0, 42)
    third.load_state_dict(second.state_dict())
    assert third.state_dict() == second.state_dict()


class _Counting(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(torch.arange(24))


def _read(feed: StreamFeed, steps: int | None) -> list[int]:
    turns = (turn for step in feed.steps(steps, 1) for turn in step)
    return [int(i) for micro, batch in turns if micro.num_samples for i in batch]


def test_a_feed_says_where_it_stands_in_samples() -> None:
    source = source_from(TensorDataset(torch.arange(24)), Data())
    feed = MapFeed(source, BatchPlan(8, 4, 1, 24), 0, 42)
    feed.load_state_dict({"step": 4})  # as the oldest checkpoints have it
    assert feed.state_dict() == {"step": 4, "epoch": 1, "samples": 8}
    smaller = MapFeed(source, BatchPlan(4, 4, 1, 24), 0, 42)
    smaller.load_state_dict(feed.state_dict())
    assert smaller.plan.position(4) == DataPosition(4, 1, 8)


def test_every_key_that_differs_is_named_at_once() -> None:
    contract = Contract({"seed": 7, "data.shuffle": False, "torch": "2.13"}, frozenset())
    with pytest.raises(ContractChanged) as raised:
        contract.compare("step-4", {"seed": 42, "data.shuffle": True, "torch": "2.12", "old": 1})
    assert str(raised.value).splitlines() == [
        "seed = 7: was 42 when step-4 was saved; "
        "restore it, or add --accept-change seed before the script",
        "data.shuffle = false: was true when step-4 was saved; "
        "restore it, or add --accept-change data.shuffle before the script",
    ]


def test_a_key_that_is_not_known_cannot_be_accepted() -> None:
    told = "--accept-change = data.suffle: is not a setting that this run's results depend on; "
    with pytest.raises(ConfigError) as raised:
        Contract({"data.shuffle": True, "seed": 1}, frozenset({"data.suffle"}))
    assert str(raised.value) == f"{told}did you mean data.shuffle?"
    with pytest.raises(ConfigError, match=r"one of data\.shuffle, seed$"):
        Contract({"seed": 1, "data.shuffle": True}, frozenset({"weather"}))


def test_weights_that_would_be_lost_are_never_accepted() -> None:
    contract = Contract({"model": "2 tensors"}, frozenset({"model"}))
    with pytest.raises(ContractChanged, match="resume with the model that was saved"):
        contract.compare("step-4", {"model": "4 tensors"})


def test_a_fingerprint_disturbs_nothing_and_knows_when_it_cannot_tell() -> None:
    random.seed(3)
    before = random.getstate()
    steady = source_from(_Augmenting(), Data())
    assert content(steady) is not None
    assert content(steady) == content(steady)
    assert random.getstate() == before
    assert content(source_from(_Moody(), Data())) is None


class _Augmenting(Dataset[Any]):
    """Draws from the streams that are keyed."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        return {"x": torch.rand(2), "y": f"text {index} {random.random()}", "z": (b"x", 1, None)}  # noqa: S311


class _Moody(Dataset[Any]):
    """Another sample each time."""

    calls = 0

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        self.calls += 1
        return index + self.calls


def test_what_was_refused_and_accepted_is_on_record(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    train(Setup(), run.path, 2)
    other = Setup(config={"seed": 7})
    with pytest.raises(ContractChanged):
        train(other, run.path, 4)
    assert run.config()["seed"] == 42, "a refused start leaves run.yaml alone"
    train(other, run.path, 4, ("seed",))
    noted = [json.loads(line) for line in (run.path / "changes.jsonl").read_text().splitlines()]
    assert [(n["key"], n["before"], n["now"], n["outcome"]) for n in noted] == [
        ("seed", 42, 7, "refused"),
        ("seed", 42, 7, "accepted"),
    ]
    assert "seed: 42" in (run.attempt(1) / "run.yaml").read_text()
    assert "seed: 7" in (run.attempt(2) / "run.yaml").read_text()


def _train_own_length(run: Path) -> None:
    import os

    train(Setup(length=24 if os.environ["RANK"] == "0" else 20), run, 4)


def test_ranks_with_other_data_are_told_apart_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailure) as raised:
        run_ranks(_train_own_length, 2, args=(tmp_path / "run",))
    said = str(raised.value)
    assert "data.length = 20: on rank 1, but 24 on rank 0" in said
    assert not list((tmp_path / "run").glob("checkpoints/step-*"))

"""What ranks, loader processes and resumed runs read of a stream: the same, or it is refused."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from drivetrain.core.errors import ConfigError, WorkerFailure
from drivetrain.record import session
from drivetrain.testing import run_ranks
from tests.streams.kinds import NUM_SAMPLES, Numbers, OwnRandomOrder, ReadyBatches, SplitsByRank
from tests.streams.running import train, used_in, verdict


def read(kind: str, data: dict[str, Any], run: str) -> None:
    import multiprocessing

    multiprocessing.set_start_method("fork", force=True)
    train(globals()[kind], run, {"data": data})


def on_two_ranks(kind: str, run: Path, **data: Any) -> str:
    """Whether every sample was used once, on two ranks."""
    run_ranks(read, 2, args=(kind, data, str(run)))
    return verdict(used_in(str(run), [_logs(run)]), NUM_SAMPLES)


def _logs(run: Path) -> list[str]:
    return sorted(name for name in os.listdir(run) if name.startswith("used-"))


@pytest.fixture(autouse=True)
def _own_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(session.RUN_DIR, "")
    monkeypatch.setattr(session, "_opened", 0)


def test_a_stream_that_splits_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailure, match="reads different samples than rank") as failure:
        on_two_ranks("SplitsByRank", tmp_path / "run")
    assert "data.iterable_sharding=already_sharded" in str(failure.value)
    assert "data = SplitsByRank" in str(failure.value)


def test_it_may_be_declared(tmp_path: Path) -> None:
    sharding = {"iterable_sharding": "already_sharded"}
    assert on_two_ranks("SplitsByRank", tmp_path / "run", **sharding) == "exact"


def test_a_random_order_of_its_own_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailure, match="in a different order|different samples"):
        on_two_ranks("OwnRandomOrder", tmp_path / "run")


def test_a_declared_split_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailure, match="reads the same samples as rank"):
        on_two_ranks("Numbers", tmp_path / "run", iterable_sharding="already_sharded")


class ShorterOnRankOne(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        length = NUM_SAMPLES - 12 * int(os.environ["RANK"])
        return (torch.tensor(number) for number in range(length))


class ShorterByAFewOnRankOne(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        length = NUM_SAMPLES - int(os.environ["RANK"])
        return (torch.tensor(number) for number in range(length))


@pytest.mark.parametrize("kind", ["ShorterOnRankOne", "ShorterByAFewOnRankOne"])
def test_a_stream_that_ends_early_on_one_rank_is_refused(kind: str, tmp_path: Path) -> None:
    with pytest.raises(WorkerFailure, match="'s ended after|has read .* samples of epoch 0"):
        on_two_ranks(kind, tmp_path / "run")


class OtherLateOnRankOne(IterableDataset[torch.Tensor]):
    """The same at first."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(NUM_SAMPLES):
            is_swapped = os.environ["RANK"] == "1" and number == 47
            yield torch.tensor(-1 if is_swapped else number)


def test_a_stream_that_differs_late_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailure, match="every rank must read the same stream"):
        on_two_ranks("OtherLateOnRankOne", tmp_path / "run")


@pytest.mark.parametrize("kind", ["SplitsByRank", "SplitsByRankAndWorker", "SplitsByWorkerId"])
def test_loader_processes_of_a_shard_split_it(kind: str, tmp_path: Path) -> None:
    data = {"iterable_sharding": "already_sharded", "num_workers": 2}
    if kind == "SplitsByWorkerId":
        with pytest.raises(WorkerFailure, match="asks for the loader process's id"):
            on_two_ranks(kind, tmp_path / "run", **data)
    else:
        assert on_two_ranks(kind, tmp_path / "run", **data) == "exact"


class SplitsByRankAndWorker(IterableDataset[torch.Tensor]):
    """Each loader process opens half of the samples, and notes how many."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        rank, worker = int(os.environ["RANK"]), torch.utils.data.get_worker_info()
        assert worker is not None
        for number in range(rank + 2 * worker.id, NUM_SAMPLES, 2 * worker.num_workers):
            yield torch.tensor(number)


class SplitsByWorkerId(SplitsByRank):
    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = torch.utils.data.get_worker_info()
        random.Random(worker.id if worker else 0)  # noqa: S311
        return super().__iter__()


def test_loader_processes_that_read_another_order_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="loader processes read different samples"):
        train(OwnRandomOrder, str(tmp_path / "run"), {"data": {"num_workers": 2}})


class Opaque:
    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class Opaques(IterableDataset[Opaque]):
    def __iter__(self) -> Iterator[Opaque]:
        return (Opaque(number) for number in range(NUM_SAMPLES))


def opaque_loader() -> Any:
    collate = lambda found: torch.tensor([each.number for each in found])  # noqa: E731
    return DataLoader(Opaques(), 2, collate_fn=collate)


def read_opaque(run: str) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        filters = warnings.simplefilter
        warnings.simplefilter = lambda *_: None
        try:
            train(opaque_loader, run, {})
        finally:
            warnings.simplefilter = filters
    return [str(each.message) for each in caught]


def test_samples_that_cannot_be_told_apart_are_announced(tmp_path: Path) -> None:
    said = run_ranks(read_opaque, 2, args=(str(tmp_path / "run"),))[0]
    assert len([text for text in said if "checked only for reading the same number" in text]) == 1


# Resuming


class Cut(Exception):
    pass


def cut_and_resume(make: Any, then: Any, run: Path, data: dict[str, Any] | None = None) -> str:
    """Ended in its eighth step in this process, and resumed from the sixth."""
    lives = []
    config: dict[str, Any] = {"data": data or {}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.kill", _cut)
        with pytest.raises(Cut):
            train(make, str(run), config, killed_at=7)
    lives.append([name.rename(name.with_suffix(".first")).name for name in run.glob("used-*")])
    train(then, str(run), config)
    lives.append([name.name for name in run.glob("used-*.jsonl")])
    return verdict(used_in(str(run), lives), NUM_SAMPLES)


def _cut(*_: Any) -> None:
    raise Cut


def test_a_stream_that_cannot_be_read_again_alike_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not repeat the samples that it gave before"):
        cut_and_resume(OwnRandomOrder, OwnRandomOrder, tmp_path / "run")


def test_another_stream_may_be_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(session.ACCEPT_CHANGE, "data.content")
    assert "WRONG" in cut_and_resume(Numbers, Backwards, tmp_path / "run")


class Backwards(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.tensor(number) for number in reversed(range(NUM_SAMPLES)))


def test_another_stream_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="gave before.*--accept-change data.content"):
        cut_and_resume(Numbers, Backwards, tmp_path / "run")


class Short(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.tensor(number) for number in range(5))


def test_a_stream_that_is_shorter_than_what_was_used_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has 5 samples, but the run had used 12"):
        cut_and_resume(Numbers, Short, tmp_path / "run")


class LosesItsBuffer(IterableDataset[torch.Tensor]):
    """A shuffle buffer whose contents are not in its state, as Hugging Face's."""

    def __init__(self) -> None:
        self.next, self.start = 0, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        draws = random.Random(5)  # noqa: S311
        buffer: list[int] = []
        self.next, self.start = self.start, 0
        while self.next < NUM_SAMPLES:
            buffer.append(self.next)
            self.next += 1
            if len(buffer) == 10:
                yield torch.tensor(buffer.pop(draws.randrange(10)))
        yield from map(torch.tensor, buffer)

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["next"]


@pytest.mark.filterwarnings("ignore:the state_dict of LosesItsBuffer")
def test_an_incomplete_state_is_noticed_and_the_stream_read_again(tmp_path: Path) -> None:
    assert cut_and_resume(LosesItsBuffer, LosesItsBuffer, tmp_path / "run") == "exact"


def test_ready_batches_are_no_samples(tmp_path: Path) -> None:
    assert on_two_ranks("ReadyBatches", tmp_path / "run", batched=True) == "exact"
    assert on_two_ranks("ready_loader", tmp_path / "loader") == "exact"
    data = {"batched": True}
    assert cut_and_resume(ReadyBatches, ReadyBatches, tmp_path / "cut", data) == "exact"


def ready_loader() -> Any:
    return DataLoader(ReadyBatches(), batch_size=None)


def test_ready_batches_of_another_size_are_refused(tmp_path: Path) -> None:
    config = {"data": {"batched": True}, "micro_batch_size": 4}
    with pytest.raises(ConfigError, match="ready batches of 2 samples.*set micro_batch_size=2"):
        train(ReadyBatches, str(tmp_path / "run"), config)


# Validation


def evaluate(kind: str, strategy: str, data: dict[str, Any], root: str) -> tuple[int, float]:
    import drivetrain

    config = {"global_batch_size": 4, "output_dir": root, "record": {"sinks": []}, "max_steps": 1}
    config |= {"data": data, "parallel": {"strategy": strategy}, "evaluation": {"batch_size": 3}}
    torch.manual_seed(0)
    loop = drivetrain.prepare(torch.nn.Linear(1, 1), None, torch.arange(8), config)

    def metrics(model: Any, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        model(batch[:, None].float())
        return {"number": batch.float().mean()}

    result = loop.evaluate(globals()[kind](), metrics)
    return result.num_samples, result.metrics["number"]


MEAN = (NUM_SAMPLES - 1) / 2


def test_a_validation_stream_that_splits_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailure, match="reads different samples than rank"):
        run_ranks(evaluate, 2, args=("SplitsByRank", "ddp", {}, str(tmp_path)))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_validation_stream_may_be_declared_to_be_split(strategy: str, tmp_path: Path) -> None:
    data = {"iterable_sharding": "already_sharded"}
    args = ("SplitsUnevenly", strategy, data, str(tmp_path))
    assert run_ranks(evaluate, 2, args=args) == [(NUM_SAMPLES, MEAN)] * 2


class SplitsUnevenly(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        numbers = range(40) if os.environ["RANK"] == "0" else range(40, NUM_SAMPLES)
        return (torch.tensor(number) for number in numbers)


def test_a_validation_stream_of_ready_batches(tmp_path: Path) -> None:
    args = ("ReadyBatches", "fsdp", {"batched": True}, str(tmp_path))
    assert run_ranks(evaluate, 2, args=args) == [(NUM_SAMPLES, MEAN)] * 2

"""Streams, loaders and objects of the user's that are interrupted and gone on with.

Saved after steps 3, 6 and 9 and interrupted in step 8 of 10, with epochs of 3 steps (the save lies
at an epoch's end) and of 4 steps (it lies within). The losses after that are those of a run that
nobody interrupted, bit for bit.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from drivetrain.core.errors import ConfigError
from drivetrain.core.stateful import Stateful
from drivetrain.record import session
from drivetrain.testing import run_ranks
from drivetrain.train.hooks import Hook
from drivetrain.train.trainer import Trainer
from tests.ranks.resuming import Interrupted
from tests.ranks.small_task import samples, small_task

Sample = tuple[torch.Tensor, torch.Tensor]
Losses = dict[int, float]
STEPS, CUT, RESUMED = 10, 8, 6
# torchdata calls a function of torch's that torch would rather not have called
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


class Stream(IterableDataset[Sample]):
    """Another order each epoch, and noise drawn on the way."""

    def __init__(self, length: int) -> None:
        self.length, self.epoch = length, 0
        self.num_read = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def sample(self, index: int) -> Sample:
        self.num_read += 1
        inputs = torch.randn(4, generator=torch.Generator().manual_seed(index + 7 * self.epoch))
        return inputs + 0.1 * torch.randn(4), inputs.argmax() % 3

    def __iter__(self) -> Iterator[Sample]:
        return (self.sample(index) for index in range(self.length))


class StatefulStream(Stream):
    """Knows where it stands."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.next = 0

    def __iter__(self) -> Iterator[Sample]:
        while self.next < self.length:
            self.next += 1
            yield self.sample(self.next - 1)
        self.next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


class ShardedStream(Stream):
    """Gives out its parts itself, as Hugging Face's streams do."""

    def shard(self, num_shards: int, index: int) -> Iterator[Sample]:
        return (self.sample(i) for i in range(index, self.length, num_shards))


class StatefulShardedStream(StatefulStream):
    """The state of the whole says nothing about a part."""

    def shard(self, num_shards: int, index: int) -> Iterator[Sample]:
        return (self.sample(i) for i in range(index, self.length, num_shards))


class Cut(Hook):
    def on_train_batch_end(self, trainer: Trainer, step: int) -> None:
        if step == CUT:
            raise Interrupted


def train(
    run: Path,
    data: Any,
    hooks: list[Hook],
    stateful: dict[str, Stateful] | None = None,
    max_steps: int = STEPS,
    **settings: Any,
) -> Losses:
    """One life of a run; in this process it may be the second."""
    os.environ[session.RUN_DIR] = str(run)
    session._opened = 0
    config = {
        "global_batch_size": 8,
        "micro_batch_size": 2,
        "max_steps": max_steps,
        "checkpoint": {"every_steps": 3, "asynchronous": False},
        "record": {"progress": "none", "sinks": []},
        "data": settings,
    }
    history = Trainer(small_task(), config, hooks, stateful).fit(data)
    return {metrics.step: metrics.loss for metrics in history.steps}


def cut_and_resumed(run: Path, make: Callable[[], Any], **settings: Any) -> tuple[Losses, Any]:
    """The losses after the interruption, and the data that was read by then."""
    with pytest.raises(Interrupted):
        train(run, make(), [Cut()], **settings)
    saved = [name for name in os.listdir(run / "checkpoints") if name.startswith("step-")]
    assert sorted(saved) == ["step-000000003-a1", "step-000000006-a1"]
    data = make()
    return train(run, data, [], **settings), data


def assert_goes_on(resumed: Losses, whole: Losses) -> None:
    assert resumed == {step: loss for step, loss in whole.items() if step > RESUMED}


@pytest.fixture(autouse=True)
def _own_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `train` sets in this process is put back."""
    monkeypatch.setenv(session.RUN_DIR, "")
    monkeypatch.setattr(session, "_opened", 0)


@pytest.mark.parametrize("length", [21, 32], ids=["at an epoch's end", "within an epoch"])
@pytest.mark.parametrize("kind", [Stream, StatefulStream])
def test_a_stream(kind: type[Stream], length: int, tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", kind(length), [])
    assert len(whole) == STEPS
    resumed, data = cut_and_resumed(tmp_path / "cut", lambda: kind(length))
    assert_goes_on(resumed, whole)
    if kind is StatefulStream:
        # a batch of five ends an epoch of 21
        expected = sum([8, 8, 5, 8] if length == 21 else [8, 8, 8, 8])
        assert data.num_read == expected, "it is read from where it stood, and to where it ends"


@pytest.mark.parametrize("length", [21, 32])
@pytest.mark.parametrize("kind", [Stream, StatefulStream])
def test_a_run_that_had_ended_and_is_made_longer(
    kind: type[Stream], length: int, tmp_path: Path
) -> None:
    whole = train(tmp_path / "whole", kind(length), [])
    train(tmp_path / "longer", kind(length), [], max_steps=5)
    resumed = train(tmp_path / "longer", kind(length), [])
    assert resumed == {step: loss for step, loss in whole.items() if step > 5}


@pytest.mark.parametrize("kind", [Stream, StatefulStream])
def test_a_stream_read_by_loader_processes(kind: type[Stream], tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", kind(32), [], num_workers=2)
    resumed, _ = cut_and_resumed(tmp_path / "cut", lambda: kind(32), num_workers=2)
    assert_goes_on(resumed, whole)
    assert whole == train(tmp_path / "alone", kind(32), []), "nor do processes change anything"


# On two ranks


def on_two_ranks(root: str) -> dict[str, tuple[Losses, Losses]]:
    """Every kind of stream, whole and interrupted, one after the other in one world."""
    # as under a launcher; what a spawned process spawns would import torch again each time
    multiprocessing.set_start_method("fork", force=True)
    kinds = [Stream, StatefulStream, ShardedStream, StatefulShardedStream]
    outcomes = {}
    for kind in kinds:
        for sharding in ("same_stream", "own_shard"):
            for num_workers in (0, 2) if kind in (Stream, StatefulShardedStream) else (0,):
                name = f"{kind.__name__}-{sharding}-{num_workers}"
                settings: dict[str, Any] = {"iterable_sharding": sharding}
                settings |= {"num_workers": num_workers}
                whole = train(Path(root, name, "whole"), kind(32), [], **settings)
                run = Path(root, name, "cut")
                resumed, _ = cut_and_resumed(run, partial(kind, 32), **settings)
                outcomes[name] = (resumed, whole)
    return outcomes


@pytest.mark.slow
@pytest.mark.long
def test_every_stream_on_two_ranks(tmp_path: Path) -> None:
    outcomes = run_ranks(on_two_ranks, 2, 120, args=(str(tmp_path),))[0]
    assert len(outcomes) == 12
    wrong = [
        name
        for name, (resumed, whole) in outcomes.items()
        if resumed != {step: loss for step, loss in whole.items() if step > RESUMED}
    ]
    assert wrong == []


def own_shard_here(run: str) -> Losses:
    return train(Path(run), ShardedStream(32), [], iterable_sharding="own_shard")


@pytest.mark.slow
@pytest.mark.long
def test_shards_are_not_gone_on_with_by_another_number_of_ranks(tmp_path: Path) -> None:
    run_ranks(own_shard_here, 2, args=(str(tmp_path / "run"),))
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000000010-a1")
    with pytest.raises(
        ConfigError, match="saved reading 2 shards, and would resume reading the whole"
    ):
        own_shard_here(str(tmp_path / "run"))


# torchdata's loader, and objects of the user's


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stateful_data_loader_in_fit(num_workers: int, tmp_path: Path) -> None:
    def loader() -> Any:
        return StatefulDataLoader(samples(), shuffle=True, num_workers=num_workers)

    whole = train(tmp_path / "whole", loader(), [])
    resumed, _ = cut_and_resumed(tmp_path / "cut", loader)
    assert_goes_on(resumed, whole)


def test_a_stateful_data_loader_of_a_stream_in_fit(tmp_path: Path) -> None:
    def of_samples() -> Any:
        return StatefulDataLoader(StatefulStream(32), batch_size=1)

    whole = train(tmp_path / "whole", of_samples(), [])
    resumed, _ = cut_and_resumed(tmp_path / "cut", of_samples)
    assert_goes_on(resumed, whole)


class Draws(Hook):
    """Takes a batch from a loader of its own at each step."""

    def __init__(self, loader: Any) -> None:
        self.loader: Any = loader
        self.iterator: Any = None
        self.drawn: dict[int, float] = {}

    def on_train_batch_start(self, trainer: Trainer, step: int) -> None:
        self.iterator = self.iterator or iter(self.loader)
        batch = next(self.iterator, None)
        if batch is None:
            self.iterator = iter(self.loader)
            batch = next(self.iterator)
        self.drawn[step - 1] = float(batch[0].sum())


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stateful_data_loader_of_the_users(num_workers: int, tmp_path: Path) -> None:
    def loader() -> Any:
        torch.manual_seed(5)  # as a script does: this loader draws its seed when it is made
        return StatefulDataLoader(samples(), 10, shuffle=True, num_workers=num_workers)

    def life(run: Path, *more: Hook) -> dict[int, float]:
        mine = loader()
        draws = Draws(mine)
        try:
            train(run, samples(), [draws, *more], {"mine": mine})
        finally:
            draws.iterator = None
        return draws.drawn

    whole = life(tmp_path / "whole")
    assert len(set(whole.values())) == STEPS, "or else the order would not matter"
    with pytest.raises(Interrupted):
        life(tmp_path / "cut", Cut())
    assert life(tmp_path / "cut") == {step: v for step, v in whole.items() if step >= RESUMED}


class Average(Hook):
    """A running average of the weights, kept by the user."""

    def __init__(self) -> None:
        self.average: torch.Tensor | None = None

    def on_train_batch_end(self, trainer: Trainer, step: int) -> None:
        now = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
        self.average = now if self.average is None else self.average.lerp(now, 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average = state["average"]


def test_a_hook_with_a_state(tmp_path: Path) -> None:
    averages = []
    for run, lives in (("whole", [()]), ("cut", [(Cut(),), ()])):
        for more in lives:
            hook = Average()
            try:
                train(tmp_path / run, samples(), [hook, *more])
            except Interrupted:
                continue
            averages.append(hook.average)
    assert averages[0] is not None
    assert averages[1] is not None
    assert torch.equal(averages[0], averages[1])


class OnDisk(Average):
    def state_dict(self) -> dict[str, Any]:
        return {"path": Path("average.pt")}


def test_a_state_that_could_not_be_read_back_is_refused_at_the_first_save(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="state_dict of hook.0.OnDisk: cannot be saved without"):
        train(tmp_path / "run", samples(), [OnDisk()])


class Random(Hook):
    """Draws before each step, when the last one's random streams are still in place."""

    def __init__(self) -> None:
        self.drawn: dict[int, float] = {}

    def on_train_batch_start(self, trainer: Trainer, step: int) -> None:
        self.drawn[step - 1] = float(torch.rand(1))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_a_hook_draws(num_workers: int, tmp_path: Path) -> None:
    whole, resumed = Random(), Random()
    train(tmp_path / "whole", samples(), [whole], num_workers=num_workers)
    with pytest.raises(Interrupted):
        train(tmp_path / "cut", samples(), [Random(), Cut()], num_workers=num_workers)
    train(tmp_path / "cut", samples(), [resumed], num_workers=num_workers)
    assert resumed.drawn == {step: v for step, v in whole.drawn.items() if step >= RESUMED}

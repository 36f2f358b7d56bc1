"""data.shuffle beside a DataLoader, which decides for itself: recorded as it is, or refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset

from drivetrain import ConfigError, Hook, Task, Trainer, load_config
from drivetrain.record.run_directory import config_so_far
from drivetrain.train.setup import choices
from tests.ranks.resuming import Interrupted, go_on_in

KEY = "data.shuffle"
UNSHUFFLED, SHUFFLED = "the DataLoader does not shuffle", "the DataLoader shuffles"


def data() -> TensorDataset:
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, (x.sum(1) > 0).long())


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(data())


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


class Stops(Hook):
    """Ends an attempt after its second step."""

    def on_train_batch_start(self, trainer: Trainer, step: int) -> None:
        if step == 3:
            raise Interrupted


def fit(tmp_path: Path, source: Any, *words: str, hooks: Any = (), **said: Any) -> Trainer:
    base = {
        "global_batch_size": 8,
        "max_steps": 4,
        "output_dir": str(tmp_path),
        "checkpoint": {"every_steps": 1, "asynchronous": False},
        "record": {"progress": "none", "sinks": []},
    }
    config = load_config(argv=words, defaults={**base, **said})
    trainer = Trainer(Task(lambda: nn.Linear(4, 2), loss), config, hooks)
    trainer.fit(source)
    return trainer


def recorded(trainer: Trainer) -> tuple[bool, str]:
    """The key's value and its source, as run.yaml has them."""
    assert trainer.assembly is not None
    document = yaml.safe_load(trainer.assembly.resolved.to_yaml())
    return document["config"]["data"]["shuffle"], document["sources"][KEY]


def test_a_start_says_that_a_loaders_batches_are_not_used(tmp_path: Path) -> None:
    def line(source: Any, **said: Any) -> str:
        said = {"global_batch_size": 4, "micro_batch_size": 2, **said}
        assembly = fit(tmp_path, source, **said).assembly
        assert assembly is not None
        return "".join(note for note in assembly.notes if note.startswith("data: its DataLoader's"))

    for source in (
        data(),
        DataLoader(data()),
        DataLoader(data(), batch_size=2),
        DataLoader(data(), batch_size=4, drop_last=True),
        DataLoader(data(), sampler=RandomSampler(data(), replacement=True)),
        DataLoader(Stream(), batch_size=3, drop_last=True),
    ):
        assert line(source, num_train_epochs=None) == "", source
    said = "data: its DataLoader's {} not used: a step has {} samples, in micro-batches of {}"
    sized, dropping = DataLoader(data(), batch_size=8), DataLoader(data(), 2, drop_last=True)
    assert line(sized) == said.format("batch_size=8 is", 4, 2)
    last = "; an epoch's last step has 4"
    sizes = {"global_batch_size": 6, "micro_batch_size": 2}
    assert line(dropping, **sizes) == said.format("drop_last=True is", 6, 2) + last
    both = DataLoader(data(), batch_size=5, drop_last=True)
    assert line(both, **sizes) == said.format("batch_size=5 and drop_last=True are", 6, 2) + last


def test_a_start_says_that_a_loaders_generator_is_not_used(tmp_path: Path) -> None:
    def line(source: Any) -> str:
        assembly = fit(tmp_path, source, seed=7).assembly
        assert assembly is not None
        return "".join(note for note in assembly.notes if "generator" in note)

    own = torch.Generator().manual_seed(3)
    said = "data: the DataLoader's generator is not used: the order comes from seed=7"
    assert line(DataLoader(data(), shuffle=True, generator=own)) == said
    assert line(DataLoader(data(), sampler=RandomSampler(data(), generator=own))) == said
    for silent in (DataLoader(data(), shuffle=True), DataLoader(data(), generator=own)):
        assert line(silent) == ""  # the second one reads in order


def test_a_start_says_that_a_loader_reads_in_order_unless_the_config_did(tmp_path: Path) -> None:
    def says_so(source: Any, *words: str) -> bool:
        assembly = fit(tmp_path, source, *words).assembly
        assert assembly is not None
        return choices.IN_ORDER in assembly.notes

    assert says_so(DataLoader(data()))
    assert not says_so(DataLoader(data()), "data.shuffle=false")
    assert not says_so(DataLoader(data(), shuffle=True))
    assert not says_so(DataLoader(data(), sampler=RandomSampler(data(), replacement=True)))
    assert not says_so(DataLoader(Stream()), "num_train_epochs=null")
    assert not says_so(data(), "data.shuffle=false")


def test_what_the_data_decides_is_recorded(tmp_path: Path) -> None:
    def found(source: Any) -> tuple[bool, str]:
        return recorded(fit(tmp_path, source))

    sampler = RandomSampler(data(), replacement=True)
    assert found(DataLoader(data())) == (False, f"chosen: {UNSHUFFLED}")
    assert found(DataLoader(data(), shuffle=True)) == (True, f"chosen: {SHUFFLED}")
    own = (False, "chosen: the DataLoader has its own sampler")
    assert found(DataLoader(data(), sampler=sampler)) == own
    assert found(Stream()) == (False, "chosen: a stream is read in its own order")
    assert found(data()) == (True, "default")


def test_the_opposite_is_refused(tmp_path: Path) -> None:
    def refused(source: Any, *words: str) -> str:
        with pytest.raises(ConfigError) as raised:
            fit(tmp_path, source, *words)
        return str(raised.value)

    assert refused(DataLoader(data()), f"{KEY}=true") == (
        f"{KEY} = true: set on the command line, but {UNSHUFFLED}; leave it out, or write "
        "DataLoader(…, shuffle=True)"
    )
    file = tmp_path / "mine.yaml"
    file.write_text("data: {shuffle: false}")
    assert refused(DataLoader(data(), shuffle=True), "--config", str(file)) == (
        f"{KEY} = false: set in {file}, but {SHUFFLED}; leave it out, or write "
        "DataLoader(…, shuffle=False)"
    )
    said = "set on the command line, but a stream is read in its own order; leave it out"
    assert refused(Stream(), f"{KEY}=true") == f"{KEY} = true: {said}"


def test_the_same_is_the_users_own(tmp_path: Path) -> None:
    found = fit(tmp_path, DataLoader(data()), f"{KEY}=false")
    assert recorded(found) == (False, "command line")
    assert recorded(fit(tmp_path, data(), f"{KEY}=false")) == (False, "command line")


@pytest.mark.parametrize("in_a_file", [False, True])
def test_a_script_or_a_default_in_a_file_is_warned_of(in_a_file: bool, tmp_path: Path) -> None:
    file = tmp_path / "all.yaml"
    file.write_text("data: {shuffle: true}")
    if in_a_file:
        trainer, where = fit(tmp_path, DataLoader(data()), "--config", str(file)), f"in {file}"
    else:
        trainer = fit(tmp_path, DataLoader(data()), data={"shuffle": True})
        where = "in the script's config"
    assert trainer.assembly is not None
    warning = (
        f"warning: {KEY} = true (set {where}) has no effect: {UNSHUFFLED}; leave it out, or "
        "write DataLoader(…, shuffle=True)"
    )
    assert warning in trainer.assembly.notes
    assert recorded(trainer) == (False, f"chosen: {UNSHUFFLED}")


@pytest.mark.parametrize("words", [(), (f"{KEY}=true",)])
def test_a_run_of_an_earlier_release_is_resumed(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It recorded the default, or what was set, whatever the DataLoader did."""
    with monkeypatch.context() as earlier:
        earlier.setattr(choices, "choose_order", lambda resolved, source: (resolved, []))  # noqa: ARG005
        go_on_in(tmp_path / "run", earlier)
        with pytest.raises(Interrupted):
            fit(tmp_path, DataLoader(data()), *words, hooks=[Stops()])
    assert config_so_far(tmp_path / "run")["data"]["shuffle"] is True
    for hooks in ([Stops()], []):
        go_on_in(tmp_path / "run", monkeypatch)
        if hooks:
            with pytest.raises(Interrupted):
                fit(tmp_path, DataLoader(data()), *words, hooks=hooks)
        else:
            history = fit(tmp_path, DataLoader(data()), *words).history
            assert [each.step for each in history.steps] == [3, 4]


def test_a_run_is_resumed_in_the_same_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = fit(tmp_path, DataLoader(data())).history.losses
    go_on_in(tmp_path / "run", monkeypatch)
    with pytest.raises(Interrupted):
        fit(tmp_path, DataLoader(data()), hooks=[Stops()])
    go_on_in(tmp_path / "run", monkeypatch)
    resumed = fit(tmp_path, DataLoader(data()))
    assert 0 < len(resumed.history.losses) < 4
    assert resumed.history.losses == whole[-len(resumed.history.losses) :]
    assert recorded(resumed) == (False, f"chosen: {UNSHUFFLED}")
    go_on_in(tmp_path / "run", monkeypatch)
    with pytest.raises(ConfigError, match=r"data.shuffle = true: was false when step-"):
        fit(tmp_path, DataLoader(data(), shuffle=True), max_steps=8)

"""fsdp: what is sharded one by one, and weights that several modules share."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from drivetrain.core.errors import ConfigError
from drivetrain.strategies.fsdp.strategy import not_reached
from drivetrain.strategies.fsdp.units import notes_of, units
from drivetrain.testing import run_ranks
from drivetrain.train.task import Task
from drivetrain.train.trainer import Trainer
from tests.ranks.training import settings


class Shared(nn.Module):
    """One block has a weight of another, one has one of the root's, one is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Linear(8, 8, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.blocks[1].weight = self.blocks[0].weight
        self.blocks[2].weight = self.front.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.front(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), torch.ones_like(batch[0]))


def train(folder: str, parallel: dict[str, Any], model: type[nn.Module] = Shared) -> list[float]:
    data = TensorDataset(torch.randn(64, 8, generator=torch.Generator().manual_seed(1)))
    config = settings(
        folder, max_steps=6, global_batch_size=16, micro_batch_size=4, parallel=parallel
    )
    return [step.loss for step in Trainer(Task(model, loss), config).fit(data).steps]


def test_shared_weights_train_as_one(tmp_path: Path) -> None:
    expected = train(str(tmp_path / "one"), {})
    found = run_ranks(train, 2, 60, args=(str(tmp_path / "two"), {"strategy": "fsdp"}))
    assert found[0] == found[1] == pytest.approx(expected, rel=1e-6)


def test_only_what_shares_nothing_is_a_unit() -> None:
    model = Shared()
    assert units(model, ()) == [model.blocks[3]]
    (note,) = notes_of(model, ())
    assert note.startswith("fsdp: 3 blocks share weights with other parts of the")


def test_a_shared_weight_that_is_named_is_refused() -> None:
    model = Shared()
    assert units(model, ("blocks.3",)) == [model.blocks[3]]
    with pytest.raises(ConfigError, match=r"front shares a weight with blocks\.2"):
        units(model, ("front", "blocks.3"))


class KeepsReferences(nn.Module):
    """Computes with the weights it was made with."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Linear(8, 8)
        self.kept = [self.front.weight, self.front.bias]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, *self.kept)


class HasAnUnusedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.front, self.unused = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.front(x)
        return y


def explained(folder: str) -> list[str]:
    with pytest.raises(RuntimeError) as told:
        train(folder, {"strategy": "fsdp"}, KeepsReferences)
    return told.value.__notes__


def test_a_model_that_keeps_references_to_its_weights_is_told_so(tmp_path: Path) -> None:
    for notes in run_ranks(explained, 2, 60, args=(str(tmp_path),)):
        assert any("keeps references to its original weights" in note for note in notes)


def test_a_model_of_which_no_weight_gets_a_gradient_is_refused() -> None:
    model = HasAnUnusedLayer()
    with pytest.raises(ConfigError, match="no weight of HasAnUnusedLayer got a gradient.*Keras"):
        not_reached(model)
    model(torch.ones(1, 8)).sum().backward()
    assert "not depend on unused.weight and 1 more: not trained" in not_reached(model)
    model.unused.requires_grad_(False)
    assert not_reached(model) == ""


def warned(folder: str) -> list[str]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train(folder, {"strategy": "fsdp"}, HasAnUnusedLayer)
    return [str(each.message) for each in said if "not trained" in str(each.message)]


def test_weights_that_are_not_trained_are_named_once(tmp_path: Path) -> None:
    first, second = run_ranks(warned, 2, 60, args=(str(tmp_path),))
    assert (len(first), second) == (1, [])


class ReturnsViews(nn.Module):
    """On sequences, the output of a Linear is a view."""

    is_in_place = False

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            if self.is_in_place:
                x += 1.0
        y: torch.Tensor = self.head(x)
        return y


class ChangesViews(ReturnsViews):
    is_in_place = True


def on_sequences(folder: str, model: type[nn.Module]) -> list[str]:
    data = TensorDataset(torch.randn(16, 4, 8, generator=torch.Generator().manual_seed(1)))
    config = settings(
        folder, max_steps=6, global_batch_size=16, micro_batch_size=4, parallel={"strategy": "fsdp"}
    )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            Trainer(Task(model, loss), config).fit(data)
        except RuntimeError as error:
            return error.__notes__
    return [str(each.message) for each in said if "view" in str(each.message)]


def test_a_view_is_no_reason_to_warn_but_its_change_in_place_is_explained(tmp_path: Path) -> None:
    assert run_ranks(on_sequences, 2, 60, args=(str(tmp_path), ReturnsViews)) == [[], []]
    for notes in run_ranks(on_sequences, 2, 60, args=(str(tmp_path), ChangesViews)):
        assert any("must not be changed in place" in note for note in notes)

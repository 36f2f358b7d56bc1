"""Stages: pure arithmetic, and models that are cut on one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from drivetrain.config.schema import Pipeline
from drivetrain.core.errors import ConfigError
from drivetrain.parallel.pipeline.anatomy import (
    anatomy_of,
    balanced_stages,
    stages_at,
    stages_of_rank,
)
from drivetrain.parallel.pipeline.cut import cut_model
from drivetrain.parallel.pipeline.schedules import bubble, fits, num_stages
from drivetrain.parallel.pipeline.stage import Stage
from tests.gpt_task import GPT


def test_stages_are_as_even_as_can_be() -> None:
    assert balanced_stages([1, 1, 1, 1], (0, 0), 2) == [range(2), range(2, 4)]
    assert balanced_stages([1, 1, 1, 1], (2, 0), 2) == [range(1), range(1, 4)]
    assert balanced_stages([5, 1, 1, 1], (0, 0), 2) == [range(1), range(1, 4)]
    with pytest.raises(ConfigError, match="5 stages need at least one block each"):
        balanced_stages([1, 1], (0, 0), 5)


def test_a_split_point_must_be_a_block() -> None:
    with pytest.raises(ConfigError, match=r"no block has this name; use blocks.1"):
        cut_model(GPT(), Pipeline(split_points=("head",)), 0, 2)
    with pytest.raises(ConfigError, match="makes 1 stages, but the schedule needs 2"):
        stages_at(anatomy_of(GPT()), (), 2)


def test_a_v_turns_at_the_last_rank() -> None:
    assert [stages_of_rank(r, 3, 6, is_v=True) for r in range(3)] == [[0, 5], [1, 4], [2, 3]]
    assert [stages_of_rank(r, 3, 6, is_v=False) for r in range(3)] == [[0, 3], [1, 4], [2, 5]]


def test_the_bubble_shrinks_with_micro_batches_and_stages() -> None:
    assert bubble(Pipeline(schedule="1f1b"), 4, 4) == pytest.approx(3 / 7)
    assert bubble(Pipeline(schedule="1f1b"), 4, 12) == pytest.approx(3 / 15)
    assert bubble(Pipeline(schedule="interleaved_1f1b"), 4, 12) == pytest.approx(3 / 27)
    assert num_stages(Pipeline(schedule="zbv"), 4) == 8
    assert not fits("interleaved_1f1b", 5, 2, 4)


class Tied(GPT):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.tokens.weight


class Loose(GPT):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Tied, "same weight as"),
        (Loose, "not in a module that one stage can hold"),
        (nn.Identity, "no repeated"),
    ],
)
def test_models_that_cannot_be_cut_are_refused(model: type[nn.Module], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        cut_model(model(), Pipeline(), 0, 2)


def test_parts_are_what_comes_before_between_and_after() -> None:
    anatomy = anatomy_of(GPT())
    assert anatomy.front == ("tokens", "positions")
    assert anatomy.blocks == ("blocks.0", "blocks.1")
    assert anatomy.back == ("norm", "head")


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zbv"])
def test_stages_one_after_the_other_are_the_model(schedule: str) -> None:
    torch.manual_seed(0)
    whole = GPT(layers=5, dropout=0.0).eval()
    ids = torch.randint(0, 32, (2, 7))
    config = Pipeline(schedule=schedule)  # type: ignore[arg-type]
    stages: dict[int, Stage] = {}
    names: list[str] = []
    for rank in range(2):
        part = GPT(layers=5, dropout=0.0).eval()
        part.load_state_dict(whole.state_dict())
        cut = cut_model(part, config, rank, 2)
        names += [name for name, _ in part.named_parameters()]
        for chunk in cut.chunks:
            stages[chunk.index] = Stage(part, chunk, cut.carry, cut.num_stages)
    assert sorted(names) == sorted(name for name, _ in whole.named_parameters())
    hidden = None
    for index in range(len(stages)):
        hidden = stages[index].run(hidden, (ids,), {})
    torch.testing.assert_close(hidden, whole(ids), rtol=0, atol=0)


class Widening(nn.Module):
    """What comes after the blocks fits the last block's output only."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(3, 4)
        self.blocks = nn.ModuleList(nn.Linear(4 + n, 5 + n) for n in range(4))
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out


def test_a_rank_with_the_first_and_the_last_stage_runs_each_by_itself() -> None:
    whole, x = Widening(), torch.randn(2, 3)
    stages: dict[int, Stage] = {}
    for rank in range(2):
        part = Widening()
        part.load_state_dict(whole.state_dict())
        cut = cut_model(part, Pipeline(schedule="zbv"), rank, 2)
        for chunk in cut.chunks:
            stages[chunk.index] = Stage(part, chunk, cut.carry, cut.num_stages)
    hidden = None
    for index in range(4):
        hidden = stages[index].run(hidden, (x,), {})
    torch.testing.assert_close(hidden, whole(x), rtol=0, atol=0)

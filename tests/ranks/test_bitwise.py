"""`reproducibility: bitwise`: the same bits at any number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import drivetrain
from drivetrain.strategies.bitwise import uncovered
from drivetrain.testing import run_ranks
from drivetrain.train.saving.weights import weights_sha256
from tests.gpt_task import GPT, token_loss
from tests.ranks.training import sentences, settings, train_gpt


def train_bitwise(output_dir: str) -> tuple[list[float], str, dict[str, float]]:
    losses, evaluation, digest = train_gpt(output_dir, with_hash=True, reproducibility="bitwise")
    return losses, digest, dict(evaluation.metrics)


@pytest.mark.slow
def test_weights_have_the_same_bits_at_any_world_size(tmp_path: Path) -> None:
    _, alone, metrics = train_bitwise(str(tmp_path))
    for world_size in (2, 3, 4):
        for _, digest, theirs in run_ranks(train_bitwise, world_size, 120, args=(str(tmp_path),)):
            assert digest == alone
            assert theirs == metrics


def own_loop_bitwise(output_dir: str) -> str:
    config = settings(output_dir, reproducibility="bitwise")
    loop = drivetrain.prepare(GPT, None, sentences(), config)
    for step in loop.steps():
        for batch in step:
            loop.backward(token_loss(loop.model, batch))
        loop.step()
    return weights_sha256(loop.assembly.engine.spread.full_state())


def test_a_loop_of_ones_own_gives_the_same_bits(tmp_path: Path) -> None:
    _, alone, _ = train_bitwise(str(tmp_path))
    assert run_ranks(own_loop_bitwise, 2, 120, args=(str(tmp_path),)) == [alone, alone]


def train_standard(output_dir: str) -> str:
    return train_gpt(output_dir, with_hash=True)[2]


def test_without_it_the_bits_do_depend_on_the_world_size(tmp_path: Path) -> None:
    """Or the test above could not fail."""
    alone = train_standard(str(tmp_path))
    assert run_ranks(train_standard, 2, 120, args=(str(tmp_path),))[0] != alone


def test_the_process_is_left_as_it_was(tmp_path: Path) -> None:
    torch.set_num_threads(2)
    train_gpt(str(tmp_path), reproducibility="bitwise", max_steps=5)
    assert torch.get_num_threads() == 2
    assert not torch.are_deterministic_algorithms_enabled()


def test_batch_norm_statistics_are_said_not_to_be_covered() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.LayerNorm(2))
    (gap,) = uncovered(model)
    assert "1 batch-norm layers (1)" in gap
    assert uncovered(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))) == []

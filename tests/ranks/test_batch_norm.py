"""Batch norm over all ranks: the numbers of one process that takes the batch at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from drivetrain.core.errors import ConfigError
from drivetrain.parallel.batch_norm import share_statistics
from drivetrain.testing import run_ranks
from drivetrain.train.task import Task
from drivetrain.train.trainer import Trainer

STEPS = 6


def model() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(2, 6, 3, bias=False),  # a norm takes a bias away again
        nn.BatchNorm1d(6),
        nn.Tanh(),
        nn.Conv1d(6, 5, 3, bias=False),
        nn.BatchNorm1d(5, affine=False, momentum=None),
        nn.Flatten(),
        nn.Linear(20, 3),
    )


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def samples() -> TensorDataset:
    # far from zero: a variance that is a difference of squares would be wrong in float32
    inputs = 50 + torch.randn(25, 2, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, torch.arange(25) % 3)


def train(output_dir: str, micro_batch_size: int, **parallel: Any) -> dict[str, Any]:
    """Of 25 samples one is left for an epoch's third step, in which the second rank has none."""
    config = {
        "global_batch_size": 12,
        "micro_batch_size": micro_batch_size,
        "max_steps": STEPS,
        "output_dir": output_dir,
        "optimization": {"learning_rate": 0.02},
        "record": {"progress": "none", "sinks": []},
        "parallel": parallel,
        "checkpoint": {"every_steps": None},
    }
    trainer = Trainer(Task(model, loss), config)
    history = trainer.fit(samples())
    assert trainer.assembly is not None
    buffers = {name: buffer.tolist() for name, buffer in trainer.model.named_buffers()}
    weights = {name: t.tolist() for name, t in trainer.full_state_dict().items()}
    said = [note for note in trainer.assembly.notes if note.startswith("batch norm")]
    return {"losses": history.losses, "buffers": buffers, "weights": weights, "said": said}


def on_two_ranks(output_dir: str) -> dict[str, Any]:
    found = {
        "ddp": train(output_dir, 6, sync_batch_norm=True),
        "fsdp": train(output_dir, 6, strategy="fsdp", sync_batch_norm=True),
        "off": train(output_dir, 6),
    }
    with pytest.raises(ConfigError, match="ranks train alone"):
        train(output_dir, 6, strategy="local_sgd", sync_batch_norm=True)
    return found


def test_two_ranks_are_one_that_takes_the_batch_at_once(tmp_path: Path) -> None:
    alone = train(str(tmp_path), 12, sync_batch_norm=True)
    assert alone["said"] == []
    ranks = run_ranks(on_two_ranks, 2, 120, args=(str(tmp_path),))
    for name in ("ddp", "fsdp"):
        assert ranks[0][name]["losses"] == pytest.approx(alone["losses"], rel=2e-5), name
        assert ranks[0][name]["buffers"] == ranks[1][name]["buffers"]
        for key, value in alone["weights"].items():
            ours, theirs = torch.tensor(ranks[0][name]["weights"][key]), torch.tensor(value)
            torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-5, msg=f"{name} {key}")
    assert ranks[0]["off"]["losses"] != pytest.approx(alone["losses"], rel=1e-3)
    assert "2 layers, with each micro-batch's own statistics" in ranks[0]["off"]["said"][0]
    assert "with statistics over all ranks" in ranks[0]["ddp"]["said"][0]


def like_torch() -> None:
    """Alone in its group, it is torch's: forward, gradients, running statistics, number formats."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        norms = [nn.BatchNorm2d(3, dtype=torch.float64 if dtype.itemsize == 8 else None)]
        norms.append(nn.BatchNorm2d(3, dtype=norms[0].weight.dtype))
        share_statistics(norms[1], torch.distributed.new_group([torch.distributed.get_rank()]))
        found = []
        for norm in norms:
            x = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(1)).to(dtype)
            x.requires_grad_()
            out = norm(x)
            assert out.dtype == dtype
            (out * torch.arange(5)).square().sum().backward()
            first = torch.autograd.grad(norm(x).square().mul(x).sum(), x, create_graph=True)[0]
            second = torch.autograd.grad(first.square().sum(), x)[0]
            twice = [] if dtype.itemsize == 2 else [second]
            found.append([*twice, out, x.grad, norm.weight.grad, *norm.buffers(), norm.eval()(x)])
        tolerance = 5e-2 if dtype.itemsize == 2 else 1e-4
        for ours, theirs in zip(found[1], found[0], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def test_on_one_rank_it_is_torchs() -> None:
    run_ranks(like_torch, 1)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"parallel": {"tp": 2, "sync_batch_norm": True}}, "tp splits them"),
        (
            {"reproducibility": "bitwise", "parallel": {"sync_batch_norm": True}},
            "the rounding of sums",
        ),
    ],
)
def test_what_it_does_not_go_with(more: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Trainer(Task(model, loss), {"global_batch_size": 8, "max_steps": 1, **more})

"""Activation recomputation: the same bits as without it, and less kept for backward."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from drivetrain.core.text import readable_bytes
from drivetrain.learn.attempt import Shortcoming, run_on_ranks
from drivetrain.learn.memory import SavedBytes
from drivetrain.learn.training import samples
from drivetrain.learn.verdict import Passed, Score

_NUM_RANKS = 2
_NUM_STEPS = 4
_NUM_BLOCKS = 6
_WIDTH, _INNER = 32, 128
_TOKENS = 64
_DROPOUT = 0.2
_READY_MADE = re.compile(r"^\s*(?:from|import) torch\.utils\b|\bcheckpoint\(", re.MULTILINE)
Apply = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def check(file: Path) -> Passed:
    if _READY_MADE.search(file.read_text()):
        expected = "your own autograd.Function"
        raise Shortcoming("ready-made", expected, "torch.utils.checkpoint", where=file.name)
    for dropout in (0.0, _DROPOUT):
        outcome = run_on_ranks(file, _train_twice, _NUM_RANKS, (dropout,))
        for rank, (reference, own) in enumerate(outcome.results):
            _judge(reference, own, rank, dropout)
    reference, own = outcome.results[0]
    limit = _least(reference)
    return Passed(
        [
            f"{_NUM_STEPS} steps of {_NUM_BLOCKS} blocks on {_NUM_RANKS} ranks, with and without"
            " dropout: losses and gradients are those without recomputation, bit for bit",
            f"kept for backward: {readable_bytes(own.peak_bytes)} at most, without recomputation"
            f" {readable_bytes(reference.peak_bytes)}",
        ],
        [
            Score("kept for backward", own.peak_bytes, limit, "the blocks' inputs + one block"),
            Score("runs of a block a step", own.runs_per_block, 2, "2", "runs"),
        ],
    )


class Block(nn.Module):
    """The half of a transformer block that has the large activations."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Linear(_WIDTH, _INNER), nn.GELU(), nn.Dropout(dropout), nn.Linear(_INNER, _WIDTH)
        )
        self.num_runs = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.num_runs += 1
        result: torch.Tensor = inputs + self.inner(inputs)
        return result


class _Model(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(12, _WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(_NUM_BLOCKS))
        self.last = nn.Linear(_WIDTH, 5)

    def forward(self, inputs: torch.Tensor, apply: Apply) -> torch.Tensor:
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = apply(block, hidden)
        result: torch.Tensor = self.last(hidden)
        return result


@dataclass(frozen=True)
class _Trained:
    losses: list[float]
    gradients: list[dict[str, list[float] | None]]
    """This rank's own gradients, by step and parameter."""
    peak_bytes: int
    inputs_bytes: int
    block_bytes: int
    runs_per_block: float


def _train_twice(module: Any, recorder: Any, dropout: float) -> tuple[_Trained, _Trained]:
    reference = _train(recorder, dropout, lambda block, inputs: block(inputs))
    return reference, _train(recorder, dropout, module.recompute)


def _train(recorder: Any, dropout: float, apply: Apply) -> _Trained:
    model = _Model(dropout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(100 + dist.get_rank())
    saved = SavedBytes(model.parameters())
    losses, gradients = [], []
    for step in range(1, _NUM_STEPS + 1):
        inputs, classes = samples(_TOKENS, seed=40 + 10 * step + dist.get_rank())
        optimizer.zero_grad()
        with saved.counting():
            loss = nn.functional.cross_entropy(model(inputs, apply), classes)
            loss.backward()
        losses.append(float(loss.detach()))
        gradients.append(_gradients(model))
        with recorder.paused():
            _average(model)
        optimizer.step()
    num_runs = sum(block.num_runs for block in model.blocks if isinstance(block, Block))
    return _Trained(
        losses,
        gradients,
        saved.peak,
        _NUM_BLOCKS * _TOKENS * _WIDTH * 4,
        _block_bytes(dropout),
        num_runs / _NUM_STEPS / _NUM_BLOCKS,
    )


def _block_bytes(dropout: float) -> int:
    """Return the bytes that one block keeps, without its input."""
    with torch.random.fork_rng():
        block = Block(dropout)
        saved = SavedBytes(block.parameters())
        inputs = torch.randn(_TOKENS, _WIDTH, requires_grad=True)
        with saved.counting():
            block(inputs).sum().backward()
    return saved.peak - _TOKENS * _WIDTH * 4


def _least(trained: _Trained) -> int:
    return trained.inputs_bytes + trained.block_bytes


def _gradients(model: nn.Module) -> dict[str, list[float] | None]:
    return {
        name: None if p.grad is None else p.grad.flatten().tolist()
        for name, p in model.named_parameters()
    }


def _average(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def _judge(reference: _Trained, own: _Trained, rank: int, dropout: float) -> None:
    where = f"rank {rank}, {'dropout ' + str(dropout) if dropout else 'no dropout'}"
    for step in range(_NUM_STEPS):
        at = f"{where}, step {step + 1}"
        if own.losses[step] != reference.losses[step]:
            raise Shortcoming(
                "random-state-moved" if dropout else "wrong-output",
                f"loss {reference.losses[step]:.6f}, as without recomputation",
                f"{own.losses[step]:.6f}",
                where=at,
            )
        _judge_gradients(reference.gradients[step], own.gradients[step], dropout, at)
    _judge_cost(reference, own, where)


def _judge_gradients(
    reference: dict[str, list[float] | None],
    own: dict[str, list[float] | None],
    dropout: float,
    where: str,
) -> None:
    wrong = [name for name, values in own.items() if values != reference[name]]
    if not wrong:
        return
    missing = [name for name in wrong if own[name] is None or not any(own[name] or ())]
    expected = "the gradient of every parameter, as without recomputation, bit for bit"
    if missing:
        is_inner = any(name.startswith("blocks.5") for name in missing)
        hint = "no-parameter-gradient" if is_inner else "no-input-gradient"
        shown = ", ".join(missing[:4]) + (" …" if len(missing) > 4 else "")
        raise Shortcoming(hint, expected, f"none for {shown}", where=where)
    hint = "other-dropout" if dropout else "wrong-gradient"
    found = f"a different one for {len(wrong)} of {len(own)} parameters, the first {wrong[0]}"
    raise Shortcoming(hint, expected, found, where=where)


def _judge_cost(reference: _Trained, own: _Trained, where: str) -> None:
    limit = _least(reference)
    if own.peak_bytes > 1.5 * limit:
        raise Shortcoming(
            "saves-all",
            f"at most the blocks' inputs and the inside of one block,"
            f" {readable_bytes(limit)}, are kept for backward",
            f"{readable_bytes(own.peak_bytes)}; without recomputation it is"
            f" {readable_bytes(reference.peak_bytes)}",
            where=where,
        )
    if own.runs_per_block > 2:
        raise Shortcoming(
            "runs-too-often",
            "every block runs twice a step: once in forward, once in backward",
            f"{own.runs_per_block:g} times",
            where=where,
        )

"""A sharded optimizer: the steps of one process, the bytes of an all-reduce, 1/n of the state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from drivetrain.core.text import readable_bytes
from drivetrain.learn.allocations import held_bytes
from drivetrain.learn.attempt import Outcome, Shortcoming, run_on_ranks
from drivetrain.learn.shards import Move, judge_move
from drivetrain.learn.training import (
    NUM_STEPS,
    global_batch,
    largest_difference,
    new_model,
    new_optimizer,
    on_one_process,
    require_same_training,
    weights_of,
)
from drivetrain.learn.verdict import Passed, Score
from drivetrain.verify.parity.compare import StepNumbers

_NUM_RANKS = 4
_SLACK = 1.05
_SGD, _ADAM = "SGD with momentum", "Adam"


def check(file: Path) -> Passed:
    outcome = run_on_ranks(file, _train, _NUM_RANKS)
    judge_move(_move_of_first_step(outcome), outcome.flow(_step(_SGD, 1)).picture())
    for name in (_SGD, _ADAM):
        _judge_training(outcome, name)
    sent, limit = _judge_bytes(outcome)
    held, part = _judge_memory(outcome)
    return Passed(
        [
            f"{NUM_STEPS} losses on {_NUM_RANKS} ranks as on one process, with {_SGD} and with"
            f" {_ADAM}; the copies of the model stay equal, bit for bit",
        ],
        [
            Score("bytes a rank sends a step", sent, limit, "2(n−1)/n·S"),
            Score(f"held between steps by a rank, with {_ADAM}", held, 3 * part, "3·P/n"),
        ],
        outcome.flow(_step(_SGD, 1)).picture(),
    )


def _optimizer_of(name: str, tensors: Any) -> torch.optim.Optimizer:
    if name == _SGD:
        return torch.optim.SGD(tensors, lr=0.2, momentum=0.9)
    return torch.optim.Adam(tensors, lr=0.01)


def _step(name: str, step: int) -> str:
    return f"{name}, step {step}"


def _model_bytes() -> int:
    return sum(p.numel() * p.element_size() for p in new_model().parameters())


def _train(module: Any, recorder: Any) -> dict[str, Any]:
    rank = dist.get_rank()
    results: dict[str, Any] = {}
    for name in (_SGD, _ADAM):
        model = new_model()
        parameters = list(model.parameters())
        optimizer = module.ShardedOptimizer(
            parameters, lambda tensors, name=name: _optimizer_of(name, tensors)
        )
        losses, weights = {}, []
        for step in range(1, NUM_STEPS + 1):
            inputs, classes = (part[rank::_NUM_RANKS] for part in global_batch(step))
            model.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), classes)
            loss.backward()
            recorder.section(_step(name, step))
            optimizer.step()
            losses[step] = float(loss.detach())
            weights.append(weights_of(model))
        model.zero_grad()
        results[name] = losses, weights, held_bytes(optimizer, parameters)
    return results


def _move_of_first_step(outcome: Outcome) -> Move:
    """Return the change of an SGD step: Adam's hardly depends on the gradient's size."""
    before = torch.tensor(weights_of(new_model()))
    _, after = on_one_process(num_steps=1)
    return Move(
        right=torch.tensor(weights_of(after)) - before,
        found=[torch.tensor(result[_SGD][1][0]) - before for result in outcome.results],
        alone=[_move_of_one(rank) for rank in range(_NUM_RANKS)],
    )


def _move_of_one(rank: int) -> torch.Tensor:
    """Return the change from a rank's own gradient alone."""
    model = new_model()
    before = torch.tensor(weights_of(model))
    inputs, classes = (part[rank::_NUM_RANKS] for part in global_batch(1))
    nn.functional.cross_entropy(model(inputs), classes).backward()
    new_optimizer(model).step()
    return torch.tensor(weights_of(model)) - before


def _judge_training(outcome: Outcome, name: str) -> None:
    reference, _ = on_one_process(optimizer_of=lambda m: _optimizer_of(name, m.parameters()))
    reference = {step: numbers._replace(gradient_norm=None) for step, numbers in reference.items()}
    by_rank = [result[name] for result in outcome.results]
    found = {
        step: StepNumbers(sum(losses[step] for losses, _, _ in by_rank) / _NUM_RANKS, None)
        for step in reference
    }
    shown = {"where": name, "picture": outcome.flow(_step(name, 2)).picture()}
    require_same_training(reference, found, "later-step", **shown)
    for rank, (_, weights, _) in enumerate(by_rank):
        if largest_difference(weights[-1], by_rank[0][1][-1]) > 0:
            raise Shortcoming(
                "later-step",
                "equal copies of the model",
                f"the weights of ranks 0 and {rank} differ",
                **shown,
            )


def _judge_bytes(outcome: Outcome) -> tuple[float, float]:
    flow = outcome.flow(_step(_SGD, 2))
    sent, size = max(flow.sent()), _model_bytes()
    limit = 2 * (_NUM_RANKS - 1) / _NUM_RANKS * size
    if sent > limit * _SLACK:
        raise Shortcoming(
            "too-many-bytes",
            f"no rank sends more than 2(n−1)/n·S = {readable_bytes(limit)} a step"
            f" (S = {readable_bytes(size)}, n = {_NUM_RANKS})",
            f"{readable_bytes(sent)}, {sent / limit:.2g} times as much",
            picture=flow.picture(),
        )
    return sent, limit


def _judge_memory(outcome: Outcome) -> tuple[float, float]:
    held, size = max(result[_ADAM][2] for result in outcome.results), _model_bytes()
    part = size / _NUM_RANKS
    if held > 4 * part * _SLACK:
        raise Shortcoming(
            "state-not-sharded" if held >= 2 * size else "keeps-too-much",
            f"with Adam, a rank holds its part of the parameters and two numbers for each of"
            f" them: 3·P/n = {readable_bytes(3 * part)} (P = {readable_bytes(size)})",
            f"{readable_bytes(held)} between steps, {held / part:.1f}·P/n",
            where=_ADAM,
        )
    return held, part

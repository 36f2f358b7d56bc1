"""A pair of linear layers split over ranks: outputs, gradients, bytes and a training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from drivetrain.core.text import readable_bytes
from drivetrain.learn.attempt import Outcome, Shortcoming, run_on_ranks
from drivetrain.learn.training import samples
from drivetrain.learn.verdict import Passed, Score
from drivetrain.verify.parity.compare import relative

_WIDTH, _HIDDEN, _TOKENS = 16, 24, 20
_NUM_STEPS = 8
_CLOSE = 1e-4
_NAMES = ("first_weight", "first_bias", "second_weight", "second_bias")


def check(file: Path) -> Passed:
    for num_ranks in (1, 2, 3):
        outcome = run_on_ranks(file, _once, num_ranks)
        _judge(outcome, num_ranks)
    least = _least_bytes(num_ranks)
    sent = _sent(outcome)
    trained = run_on_ranks(file, _train, 2)
    _judge_training(trained.results)
    return Passed(
        [
            "outputs and gradients, of the input and of every weight, on 1, 2 and 3 ranks as on"
            " one process; each rank keeps its part of the weights",
            f"a training on 2 ranks that uses it: {_NUM_STEPS} losses as on one process",
        ],
        [Score(f"bytes each of {num_ranks} ranks sends", sent, least, "2 · 2(n−1)/n·S")],
        outcome.flow("backward").picture(),
    )


def _least_bytes(num_ranks: int) -> float:
    return 2 * 2 * (num_ranks - 1) / num_ranks * _TOKENS * _WIDTH * 4


def _sent(outcome: Outcome) -> float:
    by_rank = zip(outcome.flow("forward").sent(), outcome.flow("backward").sent(), strict=True)
    return max(sum(both) for both in by_rank)


def _layers() -> tuple[nn.Linear, nn.Linear]:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return nn.Linear(_WIDTH, _HIDDEN), nn.Linear(_HIDDEN, _WIDTH)


def _inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(_TOKENS, _WIDTH, generator=generator).requires_grad_()
    return inputs, torch.randn(_TOKENS, _WIDTH, generator=generator)


def _once(module: Any, recorder: Any) -> dict[str, Any]:
    first, second = _layers()
    pair = module.SplitPair(first, second)
    parts: dict[str, Any] = {name: getattr(pair, name, None) for name in _NAMES}
    if not _have_right_shapes(parts):
        return _as_lists(parts)  # forward would fail with a less helpful error
    inputs, weights = _inputs()
    recorder.section("forward")
    outputs = pair(inputs)
    recorder.section("backward")
    (outputs * weights).sum().backward()
    found = {"outputs": outputs.detach(), "inputs": inputs.grad}
    gradients = {f"gradient of {name}": part.grad for name, part in parts.items()}
    return _as_lists({**found, **parts, **gradients})


def _have_right_shapes(parts: dict[str, Any]) -> bool:
    whole, rank, num_ranks = _reference(), dist.get_rank(), dist.get_world_size()
    return all(
        getattr(part, "shape", None) == _part(name, whole[name], rank, num_ranks).shape
        for name, part in parts.items()
    )


def _as_lists(found: dict[str, Any]) -> dict[str, Any]:
    return {name: None if v is None else v.detach().tolist() for name, v in found.items()}


def _reference() -> dict[str, torch.Tensor]:
    first, second = _layers()
    inputs, weights = _inputs()
    hidden = nn.functional.gelu(first(inputs))
    outputs = second(hidden)
    (outputs * weights).sum().backward()
    named = dict(zip(_NAMES, (first.weight, first.bias, second.weight, second.bias), strict=True))
    found: dict[str, Any] = {"outputs": outputs, "inputs": inputs.grad, **named}
    found |= {f"gradient of {name}": p.grad for name, p in named.items()}
    return {name: value.detach() for name, value in found.items()}


def _part(name: str, whole: torch.Tensor, rank: int, num_ranks: int) -> torch.Tensor:
    size = _HIDDEN // num_ranks
    own = slice(rank * size, (rank + 1) * size)
    if name.endswith(("first_weight", "first_bias")):
        return whole[own]
    return whole[:, own] if name.endswith("second_weight") else whole


def _judge(outcome: Outcome, num_ranks: int) -> None:
    whole = _reference()
    shown = {"where": f"{num_ranks} ranks", "picture": outcome.flow("backward").picture()}
    for rank, found in enumerate(outcome.results):
        for name in _NAMES:
            _judge_part(name, found[name], _part(name, whole[name], rank, num_ranks), rank, shown)
    for rank, found in enumerate(outcome.results):
        _judge_outputs(found["outputs"], whole, rank, num_ranks, shown)
        for name in ("inputs", *(f"gradient of {name}" for name in _NAMES)):
            right = _part(name, whole[name], rank, num_ranks)
            _judge_gradient(name, found[name], right, rank, num_ranks, shown)
    _judge_bytes(outcome, num_ranks, shown["picture"])


def _judge_part(
    name: str, found: Any, right: torch.Tensor, rank: int, shown: dict[str, Any]
) -> None:
    expected = f"rank {rank} keeps {name} of shape {tuple(right.shape)}"
    if found is None:
        raise Shortcoming("no-such-parameter", expected, "no such attribute", **shown)
    here = torch.tensor(found)
    if here.shape != right.shape:
        found_shape = f"shape {tuple(here.shape)}"
        raise Shortcoming("wrong-shard", expected, found_shape, **shown)
    if not torch.equal(here, right):
        expected += ": rank 0 has the first hidden features, rank 1 the next"
        raise Shortcoming("wrong-shard", expected, "other values", **shown)


def _judge_outputs(
    found: Any, whole: dict[str, torch.Tensor], rank: int, num_ranks: int, shown: dict[str, Any]
) -> None:
    here, right = torch.tensor(found), whole["outputs"]
    if here.shape == right.shape and _close(here, right):
        return
    bias = whole["second_bias"]
    hint, words = "wrong-output", "other values"
    if here.shape != right.shape:
        words = f"shape {tuple(here.shape)}"
    elif _close(here, right + (num_ranks - 1) * bias):
        hint, words = "bias-on-every-rank", f"the second layer's bias is added {num_ranks} times"
    elif _close(here, right - bias):
        hint, words = "bias-missing", "the output without the second layer's bias"
    elif num_ranks > 1 and float((here - right).norm()) > 0.1 * float(right.norm()):
        hint, words = "partial-output", "not the sum over the ranks"
    expected = f"rank {rank} returns what the two whole layers return"
    raise Shortcoming(hint, expected, words, **shown)


def _judge_gradient(
    name: str, found: Any, right: torch.Tensor, rank: int, num_ranks: int, shown: dict[str, Any]
) -> None:
    what = "gradient of the input" if name == "inputs" else name
    expected = f"rank {rank}: {what} as on one process, norm {float(right.norm()):.4f}"
    if found is None:
        raise Shortcoming("no-gradient", expected, "none", **shown)
    here = torch.tensor(found)
    if _close(here, right):
        return
    hint = "input-gradient-partial" if name == "inputs" else "wrong-gradient"
    if _close(here, right * num_ranks):
        hint = "gradient-times-n"
    words = f"norm {float(here.norm()):.4f}, {float(here.norm() / right.norm()):.3g} times as much"
    raise Shortcoming(hint, expected, words, **shown)


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(float((a - b).norm()) <= _CLOSE * float(b.norm()))


def _judge_bytes(outcome: Outcome, num_ranks: int, picture: str) -> None:
    sent, least = _sent(outcome), _least_bytes(num_ranks)
    if sent > 1.05 * least:
        raise Shortcoming(
            "too-many-bytes",
            "one sum of the output in forward and one of the input's gradient in backward:"
            f" {readable_bytes(least)} a rank",
            readable_bytes(sent),
            where=f"{num_ranks} ranks",
            picture=picture,
        )


def _train(module: Any, _: Any) -> list[float]:
    return _losses(module.SplitPair(*_layers()))


def _losses(pair: nn.Module) -> list[float]:
    """Train the pair between two layers that every rank has in full."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        before, after = nn.Linear(12, _WIDTH), nn.Linear(_WIDTH, 5)
    model = nn.Sequential(before, pair, after)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    losses = []
    for step in range(_NUM_STEPS):
        inputs, classes = samples(_TOKENS, seed=60 + step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), classes)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def _judge_training(results: list[list[float]]) -> None:
    first, second = _layers()
    right = _losses(nn.Sequential(first, nn.GELU(), second))
    for rank, losses in enumerate(results):
        for step, (here, there) in enumerate(zip(losses, right, strict=True), 1):
            if relative(here, there) > _CLOSE:
                raise Shortcoming(
                    "wrong-gradient",
                    f"step {step}: loss {there:.6f}, as on one process",
                    f"rank {rank}: {here:.6f}",
                    where="a training on 2 ranks",
                )

"""Loss scaling: each step compared with the fp32 gradient, with an overflow injected on one rank.

The model has a branch whose gradients are too small for fp16, so that a missing scale shows, and
the first scale is far too large.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from drivetrain.learn.attempt import Shortcoming, run_on_ranks
from drivetrain.learn.training import samples
from drivetrain.learn.verdict import Passed

_NUM_RANKS = 2
_NUM_STEPS = 16
_TOKENS = 8
_FIRST_SCALE = 2.0**23
_GROWTH_INTERVAL = 3
_BROKEN_STEP = 10
_CLIPPED_TO = 0.2
_ALLOWED = {torch.float16: 0.02, torch.bfloat16: 0.08}
_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16"}


def check(file: Path) -> Passed:
    lines = []
    for dtype, name in _NAMES.items():
        outcome = run_on_ranks(file, _train, _NUM_RANKS, (dtype,))
        by_step = list(zip(*outcome.results, strict=True))
        for step, ranks in enumerate(by_step, 1):
            _judge_step(step, ranks, dtype)
        _judge_scales(outcome.results[0], dtype)
        num_skipped = sum(not each.has_stepped for each in outcome.results[0])
        lines.append(
            f"{name}: {_NUM_STEPS - num_skipped} steps with the fp32 gradient of both ranks, within"
            f" {_ALLOWED[dtype]:.0%}, and {num_skipped} skipped on both"
        )
    faint = outcome.results[0][0].faint_norm
    lines.append(f"gradients down to a norm of {faint:.0e} arrive; the weights stay in fp32")
    return Passed(lines)


class _Faint(nn.Module):
    """A branch with little effect: its gradients are a millionth of the others'."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.branch = nn.Linear(size, size)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + 1e-6 * torch.tanh(self.branch(inputs))


def _new_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 24), nn.Tanh(), _Faint(24), nn.Linear(24, 5))


@dataclass(frozen=True)
class _Step:
    """What one rank saw of a step."""

    has_stepped: bool
    optimizer_has_stepped: bool
    scale_before: float
    scale_after: float
    is_finite: bool
    is_unchanged: bool
    is_fp32: bool
    computed_in: str
    error: float
    ratio: float
    """Gradient norm found, relative to the expected one."""
    faint_norm: float
    max_norm: float
    norm: float
    """Norm of the fp32 gradient, before clipping."""
    weights: float


def _train(module: Any, recorder: Any, dtype: torch.dtype) -> list[_Step]:
    model = _new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = None
    if dtype == torch.float16:
        scaler = module.LossScaler(_FIRST_SCALE, _GROWTH_INTERVAL)
    steps = []
    for step in range(1, _NUM_STEPS + 1):
        recorder.section(f"step {step}")
        steps.append(_one_step(module, model, optimizer, scaler, step, dtype))
    return steps


def _one_step(
    module: Any,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: Any,
    step: int,
    dtype: torch.dtype,
) -> _Step:
    # Clip only every third step: a clipped step hides other mistakes.
    max_norm = 100.0 if step % 3 else _CLIPPED_TO
    before = _flat(model.parameters())
    expected = _expected_gradient(model, step)
    norm = float(expected.norm())
    expected = expected * min(1.0, max_norm / norm)
    seen: list[torch.Tensor] = []
    formats: set[str] = set()
    hooks = [
        optimizer.register_step_pre_hook(lambda *_: seen.append(_flat_gradient(model))),
        model[0].register_forward_hook(lambda *a: formats.add(str(a[2].dtype))),  # type: ignore[index]
    ]
    scale = float(scaler.scale) if scaler else 1.0
    inputs, classes = _tokens(step, dist.get_rank(), dtype)
    has_stepped = module.train_step(model, optimizer, inputs, classes, dtype, max_norm, scaler)
    for hook in hooks:
        hook.remove()
    after = _flat(model.parameters())
    found = seen[0] if seen else torch.zeros_like(expected)
    return _Step(
        bool(has_stepped),
        bool(seen),
        scale,
        float(scaler.scale) if scaler else 1.0,
        bool(torch.isfinite(after).all()),
        torch.equal(before, after),
        all(p.dtype == torch.float32 for p in model.parameters()),
        ", ".join(sorted(formats)),
        _worst_error(model, found, expected),
        float(found.norm()) / float(expected.norm()),
        float(_faint(model, found).norm()),
        max_norm,
        norm,
        float(after.double().sum()),
    )


def _tokens(step: int, rank: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, classes = samples(_TOKENS * _NUM_RANKS, seed=900 + step)
    own = slice(rank * _TOKENS, (rank + 1) * _TOKENS)
    is_broken = step == _BROKEN_STEP and rank == 1 and dtype == torch.float16
    return inputs[own] * (1e6 if is_broken else 1.0), classes[own]


def _expected_gradient(model: nn.Module, step: int) -> torch.Tensor:
    """Return the fp32 gradient of the mean over both ranks' tokens."""
    copied = copy.deepcopy(model).float()
    copied.zero_grad()
    inputs, classes = samples(_TOKENS * _NUM_RANKS, seed=900 + step)
    nn.functional.cross_entropy(copied(inputs), classes).backward()
    return _flat_gradient(copied)


def _flat(tensors: Any) -> torch.Tensor:
    return torch.cat([t.detach().float().flatten() for t in tensors])


def _flat_gradient(model: nn.Module) -> torch.Tensor:
    return _flat(p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters())


def _piece(model: nn.Module, flat: torch.Tensor, wanted: str) -> torch.Tensor:
    begin = 0
    for name, parameter in model.named_parameters():
        if name == wanted:
            return flat[begin : begin + parameter.numel()]
        begin += parameter.numel()
    raise KeyError(wanted)


def _faint(model: nn.Module, flat: torch.Tensor) -> torch.Tensor:
    return _piece(model, flat, "2.branch.weight")


def _worst_error(model: nn.Module, found: torch.Tensor, expected: torch.Tensor) -> float:
    errors = []
    for name, _ in model.named_parameters():
        right = _piece(model, expected, name)
        errors.append(float((_piece(model, found, name) - right).norm() / right.norm()))
    return max(errors)


def _judge_step(step: int, ranks: Sequence[_Step], dtype: torch.dtype) -> None:
    where = f"{_NAMES[dtype]}, step {step}"
    if step == _BROKEN_STEP and dtype == torch.float16:
        where += ", in which rank 1 overflows"
    if len({(r.has_stepped, r.optimizer_has_stepped, r.scale_after) for r in ranks}) > 1:
        by_rank = [
            f"rank {number} {'stepped' if r.optimizer_has_stepped else 'skipped'},"
            f" scale {r.scale_after:g}"
            for number, r in enumerate(ranks)
        ]
        expected = "all ranks step, or all skip, and have the same scale"
        raise Shortcoming("ranks-disagree", expected, "\n".join(by_rank), where=where)
    one = ranks[0]
    if not all(r.is_fp32 for r in ranks):
        raise Shortcoming("weights-rounded", "weights in fp32", "other dtypes", where=where)
    if one.computed_in != str(dtype):
        expected = f"linear layers computed in {dtype}"
        raise Shortcoming("wrong-format", expected, f"in {one.computed_in or 'none'}", where=where)
    if not one.is_finite or (not one.has_stepped and not one.is_unchanged):
        found = "weights with inf or nan" if not one.is_finite else "changed weights"
        raise Shortcoming("stepped-on-overflow", "a skipped step", found, where=where)
    if one.has_stepped != one.optimizer_has_stepped:
        told = "stepped" if one.has_stepped else "skipped"
        found = f"the function returned {told}, but the optimizer did the opposite"
        raise Shortcoming(
            "return-value", "the function returns whether the optimizer stepped", found, where=where
        )
    if one.has_stepped:
        for number, each in enumerate(ranks):
            _judge_gradient(each, dtype, f"{where}, rank {number}")
    if len({r.weights for r in ranks}) > 1:
        raise Shortcoming(
            "ranks-disagree", "equal weights", "the ranks' weights differ", where=where
        )


def _judge_gradient(step: _Step, dtype: torch.dtype, where: str) -> None:
    if step.error <= _ALLOWED[dtype]:
        return
    expected = "the optimizer steps with the fp32 gradient of both ranks' tokens, of norm"
    clipped = f" clipped to {step.max_norm:g}" if step.norm > step.max_norm else ""
    if abs(step.ratio - 1) < 0.02:  # all but the faint layer is right
        found = f"a layer with faint gradients is off by {step.error:.0%}: too small for fp16"
        hint = "underflow"
    else:
        found = f"a norm {step.ratio:.4g} times as large, off by {step.error:.0%} at worst"
        hint = _which_mistake(step)
    raise Shortcoming(hint, f"{expected} {step.norm:.4f}{clipped}", found, where=where)


def _which_mistake(step: _Step) -> str:
    expected = min(step.norm, step.max_norm)
    for hint, norm in (
        ("clipped-before-unscaling", step.max_norm / step.scale_before),
        ("clipped-before-unscaling", step.max_norm / step.scale_after),
        ("still-scaled", step.norm * step.scale_before),
        ("still-scaled", step.norm * step.scale_before * _NUM_RANKS),
        ("wrong-scale", step.norm * step.scale_before / step.scale_after),
        ("not-averaged", step.norm * _NUM_RANKS),
        ("not-clipped", step.norm),
        ("still-scaled", step.max_norm),
    ):
        if norm != expected and abs(step.ratio * expected / norm - 1) < 0.03:
            return hint
    return "wrong-gradient"


def _judge_scales(steps: Sequence[_Step], dtype: torch.dtype) -> None:
    if not any(each.has_stepped for each in steps):
        found = f"{len(steps)} steps skipped, the scale is {steps[-1].scale_after:g}"
        raise Shortcoming("always-skipped", "a few skipped steps at first", found)
    if dtype != torch.float16:
        return
    num_good = 0
    for number, each in enumerate(steps, 1):
        where = f"fp16, step {number}"
        found = f"{each.scale_after:g}"
        if not each.has_stepped:
            num_good, due, hint = 0, each.scale_before / 2, "not-halved"
            expected = f"an overflow halves the scale, {each.scale_before:g} to {due:g}"
        else:
            num_good += 1
            is_due = num_good == _GROWTH_INTERVAL
            due = each.scale_before * (2 if is_due else 1)
            hint = "not-grown" if is_due else "grown-too-early"
            expected = f"the scale {due:g} after {num_good} good steps in a row"
            num_good = 0 if is_due else num_good
        if each.scale_after != due:
            raise Shortcoming(hint, expected, found, where=where)

"""A small real training: learners replace a piece of it, and the result must stay the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from drivetrain.learn.attempt import Shortcoming
from drivetrain.verify.parity.compare import TOLERANCES, Numbers, StepNumbers, first_parting

NUM_STEPS = 8
_FEATURES, _HIDDEN, _CLASSES = 12, 24, 5


def new_model(seed: int = 0) -> nn.Sequential:
    """The same on every rank."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(_FEATURES, _HIDDEN), nn.Tanh(), nn.Linear(_HIDDEN, _CLASSES))


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


def samples(num_samples: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and classes that can be learned."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(num_samples, _FEATURES, generator=generator)
    rule = torch.randn(_FEATURES, _CLASSES, generator=torch.Generator().manual_seed(7))
    return inputs, (inputs @ rule).argmax(dim=1)


def global_batch(step: int, size: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    return samples(size, seed=100 + step)


def gradient_norm(model: nn.Module) -> float:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return float(torch.stack([g.norm() for g in gradients]).norm()) if gradients else 0.0


def on_one_process(
    num_steps: int = NUM_STEPS,
    batch_of: Callable[[int], tuple[torch.Tensor, torch.Tensor]] = global_batch,
    optimizer_of: Callable[[nn.Module], torch.optim.Optimizer] = new_optimizer,
) -> tuple[Numbers, nn.Module]:
    """Train the reference: every global batch in one piece."""
    model = new_model()
    optimizer = optimizer_of(model)
    numbers = {}
    for step in range(1, num_steps + 1):
        inputs, classes = batch_of(step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), classes)
        loss.backward()
        numbers[step] = StepNumbers(float(loss.detach()), gradient_norm(model))
        optimizer.step()
    return numbers, model


def require_same_training(reference: Numbers, found: Numbers, hint: str, **shown: Any) -> None:
    """Raise Shortcoming beyond the tolerance of `drivetrain verify parity`."""
    parting = first_parting(reference, found, TOLERANCES["fp32"])
    if parting is None:
        return
    ratio = parting.here / parting.reference if parting.reference else float("nan")
    raise Shortcoming(
        hint,
        f"step {parting.step}: {parting.what} {parting.reference:.6f}, as on one process",
        f"step {parting.step}: {parting.what} {parting.here:.6f} ({ratio:.3g} times as much)",
        **shown,
    )


def weights_of(model: nn.Module) -> list[float]:
    """Return all weights as one list: a rank's result is read after it has exited."""
    weights: list[float] = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
    return weights


def largest_difference(a: Sequence[float], b: Sequence[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))

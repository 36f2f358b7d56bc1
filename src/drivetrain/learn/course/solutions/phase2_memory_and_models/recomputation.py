"""Activation recomputation: keep a block's input, and compute the rest again in backward."""

from typing import Any

import torch
from torch import nn


def recompute(block: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """Return block(inputs), without keeping its inner activations until backward."""
    result: torch.Tensor = Recomputed.apply(block, inputs)
    return result


class Recomputed(torch.autograd.Function):
    """Saves only the input. Gradients are those of block(inputs), bit for bit."""

    @staticmethod
    def forward(ctx: Any, block: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        ctx.block = block
        ctx.random_state = torch.get_rng_state()
        ctx.save_for_backward(inputs)
        return block(inputs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        (saved,) = ctx.saved_tensors
        # Detached from the graph that it came from: this block's gradient ends here.
        inputs = saved.detach().requires_grad_()
        afterwards = torch.get_rng_state()
        torch.set_rng_state(ctx.random_state)
        with torch.enable_grad():
            outputs = ctx.block(inputs)
        torch.set_rng_state(afterwards)
        torch.autograd.backward(outputs, gradient)
        return None, inputs.grad

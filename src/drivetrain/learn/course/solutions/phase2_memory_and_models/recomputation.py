"""Activation recomputation: a block's input is kept, and the rest computed again in backward."""

from typing import Any

import torch
from torch import nn


def recompute(block: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """block(inputs), without keeping what is inside it until backward."""
    result: torch.Tensor = Recomputed.apply(block, inputs)
    return result


class Recomputed(torch.autograd.Function):
    """Saves the input only. Gradients are, to the last bit, those of block(inputs)."""

    @staticmethod
    def forward(ctx: Any, block: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        ctx.block = block
        ctx.random_state = torch.get_rng_state()
        ctx.save_for_backward(inputs)
        return block(inputs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        (saved,) = ctx.saved_tensors
        # Apart from the graph it came from: the gradient of this block ends here.
        inputs = saved.detach().requires_grad_()
        afterwards = torch.get_rng_state()
        torch.set_rng_state(ctx.random_state)
        with torch.enable_grad():
            outputs = ctx.block(inputs)
        torch.set_rng_state(afterwards)
        torch.autograd.backward(outputs, gradient)
        return None, inputs.grad

"""Gradient accumulation: many micro-batches, one reduction, every token with the same weight."""

import torch
import torch.distributed as dist
from torch import nn


def accumulate(
    model: nn.Module, micro_batches: list[tuple[torch.Tensor, torch.Tensor]]
) -> torch.Tensor:
    """Leave in every parameter's `.grad` the gradient of the mean loss over all tokens."""
    counts = torch.zeros(2)
    for inputs, classes in micro_batches:
        loss_sum = nn.functional.cross_entropy(model(inputs), classes, reduction="sum")
        # Adds to .grad, and frees this micro-batch's activations before the next one runs.
        loss_sum.backward()
        counts += torch.tensor([float(len(classes)), float(loss_sum.detach())])

    # Only now: sums can be added over ranks as over micro-batches.
    parameters = list(model.parameters())
    flat = torch.cat([p.grad.flatten() for p in parameters] + [counts])
    dist.all_reduce(flat)
    num_tokens, total_loss = flat[-2], flat[-1]

    begin = 0
    for parameter in parameters:
        piece = flat[begin : begin + parameter.numel()]
        parameter.grad.copy_(piece.view_as(parameter) / num_tokens)
        begin += parameter.numel()
    return total_loss / num_tokens

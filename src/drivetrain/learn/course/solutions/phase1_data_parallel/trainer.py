"""One synchronous data-parallel step: the gradient of the mean over all tokens of all ranks."""

import torch
import torch.distributed as dist
from torch import nn


def backward_and_average(
    model: nn.Module, inputs: torch.Tensor, classes: torch.Tensor
) -> torch.Tensor:
    """Leave in every parameter's `.grad` the gradient of the mean loss over all ranks' tokens."""
    # The sum, not the mean: a rank with 17 tokens then counts 17 times as much as one token.
    loss_sum = nn.functional.cross_entropy(model(inputs), classes, reduction="sum")
    loss_sum.backward()

    # One message instead of one per parameter: gradients, the number of tokens and the loss.
    parameters = list(model.parameters())
    counts = torch.tensor([float(len(classes)), float(loss_sum.detach())])
    flat = torch.cat([p.grad.flatten() for p in parameters] + [counts])
    dist.all_reduce(flat)
    num_tokens, total_loss = flat[-2], flat[-1]

    begin = 0
    for parameter in parameters:
        piece = flat[begin : begin + parameter.numel()]
        parameter.grad.copy_(piece.view_as(parameter) / num_tokens)
        begin += parameter.numel()
    return total_loss / num_tokens

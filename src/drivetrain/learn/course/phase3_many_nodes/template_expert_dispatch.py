"""Exercise expert_dispatch: send every token to its expert and back.

Guidelines: guidelines.md, part 9. Check: drivetrain learn check expert_dispatch
"""

from collections.abc import Callable

import torch
import torch.distributed as dist  # noqa: F401


def dispatch(
    tokens: torch.Tensor,
    expert_of: torch.Tensor,
    expert: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Return the outputs: row i is the result of expert expert_of[i] for tokens[i].

    Rank e has expert e, as `expert`: it takes rows and returns the same number of rows, in the same
    order and of the same width. `tokens` has the shape (number, width); the number differs between
    ranks and may be 0. `expert_of` has integers from 0 to n−1. Each rank calls its expert once.

    dist.all_to_all_single(received, sent, rows_from_each, rows_to_each) sends the first
    rows_to_each[0] rows of `sent` to rank 0, the next rows_to_each[1] to rank 1 and so on.
    """
    # TODO 1: how many rows does each rank send to each? A rank knows only what it sends.
    # TODO 2: tokens in the order of their experts; exchange; compute.
    # TODO 3: back the same way, and restore the order.
    raise NotImplementedError("TODO 1 to 3 of dispatch")

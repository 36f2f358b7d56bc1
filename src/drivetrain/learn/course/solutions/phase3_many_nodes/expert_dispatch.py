"""Expert dispatch: tokens to their experts by an uneven all-to-all, and back."""

from collections.abc import Callable

import torch
import torch.distributed as dist


def dispatch(
    tokens: torch.Tensor,
    expert_of: torch.Tensor,
    expert: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Return the outputs: row i is the result of expert expert_of[i] for tokens[i]."""
    # First the numbers: a rank has to allocate space for what it will receive.
    outgoing = torch.bincount(expert_of, minlength=dist.get_world_size())
    incoming = torch.empty_like(outgoing)
    dist.all_to_all_single(incoming, outgoing)
    to_each, from_each = outgoing.tolist(), incoming.tolist()

    # Rows for the same expert have to be contiguous.
    order = expert_of.argsort(stable=True)
    received = torch.empty(sum(from_each), tokens.shape[1])
    dist.all_to_all_single(received, tokens[order], from_each, to_each)
    computed = expert(received)

    # On the way back the two lists are swapped.
    returned = torch.empty_like(tokens)
    dist.all_to_all_single(returned, computed, to_each, from_each)
    result = torch.empty_like(tokens)
    result[order] = returned  # row j came from row order[j]
    return result

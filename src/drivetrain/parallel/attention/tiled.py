"""Attention in tiles of queries and keys, for devices and shapes without a fused kernel.

At no time are there more scores than one tile's, so memory grows with the sequence, not with its
square.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

# 1024 × 1024 scores of 32 heads in fp32 are 128 MB; products of this size keep a device busy
TILE = 1024


def forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, log-sum-exp of each query's scores)."""
    outputs, sums = [], []
    for rows in _tiles(query.shape[-2]):
        out: torch.Tensor | None = None
        lse: torch.Tensor | None = None
        for columns in _tiles(key.shape[-2]):
            if causal and columns.start > rows.stop - 1:
                break
            scores = _scores(query, key, rows, columns, causal=causal, scale=scale)
            own_lse = scores.logsumexp(-1)
            weights = (scores - own_lse.unsqueeze(-1)).exp_()
            own = (weights.to(value.dtype) @ value[..., columns, :]).to(scores.dtype)
            out, lse = merge(out, lse, own, own_lse)
        if out is None or lse is None:
            raise ValueError("attention without keys")
        outputs.append(out.to(query.dtype))
        sums.append(lse)
    return torch.cat(outputs, dim=-2), torch.cat(sums, dim=-1)


def backward(
    gradient: torch.Tensor,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    merged: tuple[torch.Tensor, ...],
    *,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value; `merged`: output and log-sum-exp, also of more keys."""
    query, key, value = inputs
    out, lse = merged
    wide = lse.dtype
    dots = (gradient.to(wide) * out.to(wide)).sum(-1, keepdim=True)
    to_query, to_key, to_value = (torch.zeros_like(x, dtype=wide) for x in inputs)
    for rows in _tiles(query.shape[-2]):
        for columns in _tiles(key.shape[-2]):
            if causal and columns.start > rows.stop - 1:
                break
            scores = _scores(query, key, rows, columns, causal=causal, scale=scale)
            weights = (scores - lse[..., rows].unsqueeze(-1)).exp_()
            own = gradient[..., rows, :]
            to_value[..., columns, :] += weights.to(value.dtype).mT @ own
            to_weights = (own @ value[..., columns, :].mT).to(wide)
            to_scores = (weights * (to_weights - dots[..., rows, :]) * scale).to(query.dtype)
            to_query[..., rows, :] += to_scores @ key[..., columns, :]
            to_key[..., columns, :] += to_scores.mT @ query[..., rows, :]
    return to_query.to(query.dtype), to_key.to(key.dtype), to_value.to(value.dtype)


def merge(
    out: torch.Tensor | None, lse: torch.Tensor | None, own: torch.Tensor, own_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to some keys and to some others, as attention to all of them."""
    if out is None or lse is None:
        return own, own_lse
    both = torch.logaddexp(lse, own_lse)
    share, own_share = (lse - both).exp().unsqueeze(-1), (own_lse - both).exp().unsqueeze(-1)
    return out * share + own * own_share, both


def _tiles(length: int) -> Iterator[slice]:
    return (slice(begin, min(begin + TILE, length)) for begin in range(0, length, TILE))


def _scores(
    query: torch.Tensor,
    key: torch.Tensor,
    rows: slice,
    columns: slice,
    *,
    causal: bool,
    scale: float,
) -> torch.Tensor:
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = (query[..., rows, :] @ key[..., columns, :].mT).to(wide) * scale
    if causal and columns.stop > rows.start + 1:
        shape = scores.shape[-2:]
        # the tile's own corner of the triangle: what is later than the query is not seen
        seen = torch.ones(shape, dtype=torch.bool, device=query.device)
        scores.masked_fill_(~seen.tril_(rows.start - columns.start), float("-inf"))
    return scores

"""Attention of one rank's queries to the keys and values of all ranks, part by part.

Causal attention needs no mask for that: earlier parts are seen in full, the own one with the
kernel's own causal form, later ones not at all. What the parts give is merged by the log-sum-exp
of their scores, and each part's gradient follows from the merged one.

Two operators of torch's library, so that whoever watches operators (recomputation, fake tensors)
sees one attention, not one for each part.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from drivetrain.parallel.attention.kernels import Kind, Three, attend, attend_backward
from drivetrain.parallel.attention.tiled import merge


def forward(inputs: Three, own: int | None, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, log-sum-exp) of queries to keys and values, whose parts are stacked in front.

    Queries are batch × heads × length × size. `own`: the part they belong to, of a causal
    attention; None: all parts are seen in full.
    """
    query, keys, values = inputs
    out: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    for index, kind in _seen(len(keys), own, scale):
        part, part_lse = attend((query, keys[index], values[index]), kind)
        out, lse = merge(out, lse, part.to(part_lse.dtype), part_lse)
    if out is None or lse is None:
        raise ValueError("attention to no parts")
    return out.to(query.dtype).contiguous(), lse.contiguous()


def backward(
    gradient: torch.Tensor,
    inputs: Three,
    merged: tuple[torch.Tensor, torch.Tensor],
    own: int | None,
    scale: float,
) -> Three:
    """Gradients of the inputs of `forward`, `merged` being what it returned."""
    query, keys, values = inputs
    to_query = query.new_zeros(query.shape, dtype=merged[1].dtype)
    to_keys, to_values = torch.zeros_like(keys), torch.zeros_like(values)
    for index, kind in _seen(len(keys), own, scale):
        part = (query, keys[index], values[index])
        added, to_keys[index], to_values[index] = attend_backward(gradient, part, merged, kind)
        to_query += added
    return to_query.to(query.dtype), to_keys, to_values


def _seen(num_parts: int, own: int | None, scale: float) -> Iterator[tuple[int, Kind]]:
    last = num_parts - 1 if own is None else own
    return ((index, Kind(index == own, scale)) for index in range(last + 1))


@torch.library.custom_op("drivetrain::attend_to_parts", mutates_args=())
def attend_to_parts(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, own: int | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`forward`, as an operator."""
    return forward((query, keys, values), own, scale)


@attend_to_parts.register_fake
def _(
    query: torch.Tensor,
    keys: torch.Tensor,  # noqa: ARG001
    values: torch.Tensor,
    own: int | None,  # noqa: ARG001
    scale: float,  # noqa: ARG001
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = torch.promote_types(query.dtype, torch.float32)
    out = query.new_empty((*query.shape[:-1], values.shape[-1]))
    return out, query.new_empty(query.shape[:-1], dtype=wide)


@torch.library.custom_op("drivetrain::attend_to_parts_backward", mutates_args=())
def attend_to_parts_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    own: int | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`backward`, as an operator."""
    return backward(gradient, (query, keys, values), (out, lse), own, scale)


@attend_to_parts_backward.register_fake
def _(
    gradient: torch.Tensor,  # noqa: ARG001
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,  # noqa: ARG001
    lse: torch.Tensor,  # noqa: ARG001
    own: int | None,  # noqa: ARG001
    scale: float,  # noqa: ARG001
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return query.new_empty(query.shape), torch.empty_like(keys), torch.empty_like(values)

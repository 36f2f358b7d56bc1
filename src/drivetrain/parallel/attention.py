"""Attention over a sequence whose parts are on several ranks, without a mask."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

# Attention in tiles of queries and keys, for devices and shapes without a fused kernel.
#
# Only one tile's scores exist at a time, so memory grows linearly with the sequence.

# 1024 × 1024 scores of 32 heads in fp32 are 128 MB; products of this size keep a device busy
TILE = 1024


def tiled_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (output, log-sum-exp of each query's scores)."""
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


def tiled_backward(
    gradient: torch.Tensor,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    merged: tuple[torch.Tensor, ...],
    *,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients; `merged`: output and log-sum-exp, possibly over more keys."""
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
    """Merge attention to two sets of keys into attention to all of them."""
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
        # the tile's part of the causal triangle: later keys are masked
        seen = torch.ones(shape, dtype=torch.bool, device=query.device)
        scores.masked_fill_(~seen.tril_(rows.start - columns.start), float("-inf"))
    return scores


# Attention to one part of the keys by a fused kernel, with the log-sum-exp of its scores.
#
# The public `scaled_dot_product_attention` does not return the log-sum-exp, without which parts
# cannot be merged, so the operators beneath it are called. torch chooses which one (device,
# precision, head size, `sdpa_kernel`); if it has none, tiles are used. Run on CPUs only: the calls
# of other devices' operators are checked against their schemas, not on a GPU.

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Query, key and value, or their gradients."""

_ATEN: Any = torch.ops.aten


@dataclass(frozen=True)
class AttentionKind:
    """Whether attention is causal, and its scale."""

    causal: bool
    scale: float


class Kernel(Protocol):
    """Attention to one part, forward and backward."""

    def forward(self, inputs: Three, kind: AttentionKind) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (output, log-sum-exp)."""
        ...

    def backward(
        self,
        gradient: torch.Tensor,
        inputs: Three,
        merged: tuple[torch.Tensor, ...],
        kind: AttentionKind,
    ) -> Three:
        """Return the gradients; `merged`: output and log-sum-exp over all parts."""
        ...


def attend(inputs: Three, kind: AttentionKind) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (output, log-sum-exp). Keys may have fewer heads than queries (GQA)."""
    kernel, inputs, _ = _choose(inputs, kind)
    out, lse = kernel.forward(inputs, kind)
    return out, lse


def attend_backward(
    gradient: torch.Tensor, inputs: Three, merged: tuple[torch.Tensor, ...], kind: AttentionKind
) -> Three:
    """Return what this part of the keys contributes to the gradients."""
    kernel, inputs, groups = _choose(inputs, kind)
    query, key, value = kernel.backward(gradient, inputs, merged, kind)
    return query, _added_up(key, groups), _added_up(value, groups)


class _Tiled:
    """Tiles, for every device and shape."""

    def forward(self, inputs: Three, kind: AttentionKind) -> tuple[torch.Tensor, torch.Tensor]:
        return tiled_forward(*inputs, causal=kind.causal, scale=kind.scale)

    def backward(
        self,
        gradient: torch.Tensor,
        inputs: Three,
        merged: tuple[torch.Tensor, ...],
        kind: AttentionKind,
    ) -> Three:
        return tiled_backward(gradient, inputs, merged, causal=kind.causal, scale=kind.scale)


class _FlashForCPU:
    """torch's flash attention for CPUs."""

    def forward(self, inputs: Three, kind: AttentionKind) -> tuple[torch.Tensor, torch.Tensor]:
        op = _ATEN._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001
        out, lse = op(*inputs, 0.0, kind.causal, scale=kind.scale)
        return out, lse

    def backward(
        self,
        gradient: torch.Tensor,
        inputs: Three,
        merged: tuple[torch.Tensor, ...],
        kind: AttentionKind,
    ) -> Three:
        op = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward  # noqa: SLF001
        query, key, value = op(gradient, *inputs, *merged, 0.0, kind.causal, scale=kind.scale)
        return query, key, value


class _Flash:
    """Flash attention of CUDA and XPU; head sizes are padded to a multiple of 8."""

    def forward(self, inputs: Three, kind: AttentionKind) -> tuple[torch.Tensor, torch.Tensor]:
        op = _ATEN._scaled_dot_product_flash_attention  # noqa: SLF001
        out, lse, *_ = op(*map(_filled_up, inputs), 0.0, kind.causal, scale=kind.scale)
        return out[..., : inputs[2].shape[-1]], lse

    def backward(
        self,
        gradient: torch.Tensor,
        inputs: Three,
        merged: tuple[torch.Tensor, ...],
        kind: AttentionKind,
    ) -> Three:
        op = _ATEN._scaled_dot_product_flash_attention_backward  # noqa: SLF001
        query, key, _ = inputs
        gradients = op(
            _filled_up(gradient),
            *map(_filled_up, inputs),
            _filled_up(merged[0]),
            merged[1].contiguous(),
            *(None, None, query.shape[-2], key.shape[-2]),  # all sequences have the same length
            *(0.0, kind.causal, *_seeds(query)),
            scale=kind.scale,
        )
        given = (x[..., : whole.shape[-1]] for x, whole in zip(gradients, inputs, strict=True))
        to_query, to_key, to_value = given
        return to_query, to_key, to_value


class _Efficient:
    """Memory-efficient attention of CUDA: for what flash does not support, mainly fp32."""

    _ALIGNMENT = 32  # its kernels read the log-sum-exp in blocks of this size

    def forward(self, inputs: Three, kind: AttentionKind) -> tuple[torch.Tensor, torch.Tensor]:
        op = _ATEN._scaled_dot_product_efficient_attention  # noqa: SLF001
        out, lse, *_ = op(*inputs, None, True, 0.0, kind.causal, scale=kind.scale)
        return out, lse[..., : inputs[0].shape[-2]]

    def backward(
        self,
        gradient: torch.Tensor,
        inputs: Three,
        merged: tuple[torch.Tensor, ...],
        kind: AttentionKind,
    ) -> Three:
        op = _ATEN._scaled_dot_product_efficient_attention_backward  # noqa: SLF001
        out, lse = merged
        lse = F.pad(lse, (0, -lse.shape[-1] % self._ALIGNMENT), value=math.inf).contiguous()
        wanted = [True, True, True, False]
        seeds = _seeds(inputs[0])
        query, key, value, _ = op(
            gradient, *inputs, None, out, lse, *seeds, 0.0, wanted, kind.causal, scale=kind.scale
        )
        return query, key, value


class _Overrideable:
    """The attention that an out-of-tree device registers with torch."""

    def forward(self, inputs: Three, kind: AttentionKind) -> tuple[torch.Tensor, torch.Tensor]:
        op = _ATEN._scaled_dot_product_fused_attention_overrideable  # noqa: SLF001
        out, lse, *_ = op(*inputs, None, 0.0, kind.causal, scale=kind.scale)
        return out, lse

    def backward(
        self,
        gradient: torch.Tensor,
        inputs: Three,
        merged: tuple[torch.Tensor, ...],
        kind: AttentionKind,
    ) -> Three:
        op = _ATEN._scaled_dot_product_fused_attention_overrideable_backward  # noqa: SLF001
        query, key, _ = inputs
        to_query, to_key, to_value, _ = op(
            *(gradient, *inputs, None, [True, True, True, False], *merged),
            *(None, None, query.shape[-2], key.shape[-2]),
            *(0.0, kind.causal, *_seeds(query)),
            scale=kind.scale,
        )
        return to_query, to_key, to_value


_ON_CPU = "_scaled_dot_product_flash_attention_for_cpu"
KERNELS: dict[SDPBackend, tuple[str, Kernel]] = {
    SDPBackend.FLASH_ATTENTION: ("_scaled_dot_product_flash_attention", _Flash()),
    SDPBackend.EFFICIENT_ATTENTION: ("_scaled_dot_product_efficient_attention", _Efficient()),
    SDPBackend.OVERRIDEABLE: ("_scaled_dot_product_fused_attention_overrideable", _Overrideable()),
}
TILED: Kernel = _Tiled()
_CPU: Kernel = _FlashForCPU()


def _choose(inputs: Three, kind: AttentionKind) -> tuple[Kernel, Three, int]:
    """Return the kernel, its inputs, and how often the keys' heads were repeated for it."""
    query, key, value = inputs
    groups = query.shape[1] // key.shape[1]
    kernel = _fused(inputs, kind)
    if kernel is not None or groups == 1:
        return kernel or TILED, inputs, 1
    repeated = (query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1))
    return _fused(repeated, kind) or TILED, repeated, groups


def _fused(inputs: Three, kind: AttentionKind) -> Kernel | None:
    """Return what `scaled_dot_product_attention` would use, if it can be called directly."""
    device = inputs[0].device.type
    if not has_kernel(device, "_fused_sdp_choice"):
        return None
    gqa = inputs[0].shape[1] != inputs[1].shape[1]
    was_on = torch.backends.cuda.cudnn_sdp_enabled()
    # only cuDNN's is excluded: flash attention supports everything that it supports
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        choice = torch._fused_sdp_choice  # noqa: SLF001 - it has no other name
        chosen = choice(*inputs, is_causal=kind.causal, scale=kind.scale, enable_gqa=gqa)
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was_on)
    for backend, (operator, kernel) in KERNELS.items():
        if backend.value != chosen:
            continue
        if backend is SDPBackend.FLASH_ATTENTION and has_kernel(device, _ON_CPU):
            return _CPU
        return kernel if has_kernel(device, operator) else None
    return None


@lru_cache(maxsize=64)
def has_kernel(device: str, operator: str) -> bool:
    """True if the device has its own kernel; a fallback to the CPU does not count."""
    key = torch._C._dispatch_key_for_device(device)  # noqa: SLF001 - no public way to ask
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{operator}", key)  # noqa: SLF001


def _filled_up(x: torch.Tensor) -> torch.Tensor:
    rest = -x.shape[-1] % 8
    return F.pad(x, (0, rest)) if rest else x


def _seeds(like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return placeholder dropout seeds, which are not read because there is no dropout."""
    return (like.new_empty(0, dtype=torch.int64), like.new_empty(0, dtype=torch.int64))


def _added_up(gradient: torch.Tensor, groups: int) -> torch.Tensor:
    """Add up the gradients of repeated heads."""
    return gradient if groups == 1 else gradient.unflatten(1, (-1, groups)).sum(2)


# Attention of one rank's queries to the keys and values of all ranks, part by part.
#
# Causal attention needs no mask for that: earlier parts are attended to in full, the own part with
# the kernel's causal mode, and later parts not at all. The parts' outputs are merged by the
# log-sum-exp of their scores, and each part's gradient follows from the merged output.
#
# These are two custom operators, so that selective recomputation and fake tensors see one
# attention, not one for each part.


def forward_over_parts(
    inputs: Three, own: int | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (output, log-sum-exp); the parts of keys and values are stacked along dim 0.

    Queries are batch × heads × length × size. `own`: with causal attention, the index of the part
    they belong to; None: attend to all parts in full.
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


def backward_over_parts(
    gradient: torch.Tensor,
    inputs: Three,
    merged: tuple[torch.Tensor, torch.Tensor],
    own: int | None,
    scale: float,
) -> Three:
    """Return the gradients of the inputs; `merged` is what `forward_over_parts` returned."""
    query, keys, values = inputs
    to_query = query.new_zeros(query.shape, dtype=merged[1].dtype)
    to_keys, to_values = torch.zeros_like(keys), torch.zeros_like(values)
    for index, kind in _seen(len(keys), own, scale):
        part = (query, keys[index], values[index])
        added, to_keys[index], to_values[index] = attend_backward(gradient, part, merged, kind)
        to_query += added
    return to_query.to(query.dtype), to_keys, to_values


def _seen(num_parts: int, own: int | None, scale: float) -> Iterator[tuple[int, AttentionKind]]:
    last = num_parts - 1 if own is None else own
    return ((index, AttentionKind(index == own, scale)) for index in range(last + 1))


@torch.library.custom_op("drivetrain::attend_to_parts", mutates_args=())
def attend_to_parts(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, own: int | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`forward_over_parts` as a custom operator."""
    return forward_over_parts((query, keys, values), own, scale)


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
    """`backward_over_parts` as a custom operator."""
    return backward_over_parts(gradient, (query, keys, values), (out, lse), own, scale)


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

"""Attention to one part of the keys by a fused kernel, with the log-sum-exp of its scores.

The public `scaled_dot_product_attention` keeps the log-sum-exp to itself, and without it parts
cannot be merged; so the operators beneath it are called. Which one is torch's own choice (device,
precision, head size, `sdpa_kernel`); where it has none, tiles do it. Run on CPUs only: the calls
of other devices' operators are checked against their schemas, not on a GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from drivetrain.parallel.attention import tiled

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Query, key and value, or their gradients."""

_ATEN: Any = torch.ops.aten


@dataclass(frozen=True)
class Kind:
    """Which attention it is."""

    causal: bool
    scale: float


class Kernel(Protocol):
    """Attention to one part, forward and back."""

    def forward(self, inputs: Three, kind: Kind) -> tuple[torch.Tensor, torch.Tensor]:
        """(output, log-sum-exp)."""
        ...

    def backward(
        self, gradient: torch.Tensor, inputs: Three, merged: tuple[torch.Tensor, ...], kind: Kind
    ) -> Three:
        """`merged`: output and log-sum-exp over all parts."""
        ...


def attend(inputs: Three, kind: Kind) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, log-sum-exp). Keys may have fewer heads than queries (grouped-query attention)."""
    kernel, inputs, _ = _choose(inputs, kind)
    out, lse = kernel.forward(inputs, kind)
    return out, lse


def attend_backward(
    gradient: torch.Tensor, inputs: Three, merged: tuple[torch.Tensor, ...], kind: Kind
) -> Three:
    """What the keys of this part add to the gradients."""
    kernel, inputs, groups = _choose(inputs, kind)
    query, key, value = kernel.backward(gradient, inputs, merged, kind)
    return query, _added_up(key, groups), _added_up(value, groups)


class _Tiled:
    """For every device and shape."""

    def forward(self, inputs: Three, kind: Kind) -> tuple[torch.Tensor, torch.Tensor]:
        return tiled.forward(*inputs, causal=kind.causal, scale=kind.scale)

    def backward(
        self, gradient: torch.Tensor, inputs: Three, merged: tuple[torch.Tensor, ...], kind: Kind
    ) -> Three:
        return tiled.backward(gradient, inputs, merged, causal=kind.causal, scale=kind.scale)


class _FlashForCPU:
    """torch's flash attention for CPUs."""

    def forward(self, inputs: Three, kind: Kind) -> tuple[torch.Tensor, torch.Tensor]:
        op = _ATEN._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001
        out, lse = op(*inputs, 0.0, kind.causal, scale=kind.scale)
        return out, lse

    def backward(
        self, gradient: torch.Tensor, inputs: Three, merged: tuple[torch.Tensor, ...], kind: Kind
    ) -> Three:
        op = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward  # noqa: SLF001
        query, key, value = op(gradient, *inputs, *merged, 0.0, kind.causal, scale=kind.scale)
        return query, key, value


class _Flash:
    """Flash attention of CUDA and XPU devices; heads of any size, filled up to a multiple of 8."""

    def forward(self, inputs: Three, kind: Kind) -> tuple[torch.Tensor, torch.Tensor]:
        op = _ATEN._scaled_dot_product_flash_attention  # noqa: SLF001
        out, lse, *_ = op(*map(_filled_up, inputs), 0.0, kind.causal, scale=kind.scale)
        return out[..., : inputs[2].shape[-1]], lse

    def backward(
        self, gradient: torch.Tensor, inputs: Three, merged: tuple[torch.Tensor, ...], kind: Kind
    ) -> Three:
        op = _ATEN._scaled_dot_product_flash_attention_backward  # noqa: SLF001
        query, key, _ = inputs
        gradients = op(
            _filled_up(gradient),
            *map(_filled_up, inputs),
            _filled_up(merged[0]),
            merged[1].contiguous(),
            *(None, None, query.shape[-2], key.shape[-2]),  # all sequences have one length
            *(0.0, kind.causal, *_seeds(query)),
            scale=kind.scale,
        )
        given = (x[..., : whole.shape[-1]] for x, whole in zip(gradients, inputs, strict=True))
        to_query, to_key, to_value = given
        return to_query, to_key, to_value


class _Efficient:
    """Memory-efficient attention of CUDA devices: what flash has not, fp32 above all."""

    _ALIGNMENT = 32  # of the log-sum-exp, which its kernels read in such blocks

    def forward(self, inputs: Three, kind: Kind) -> tuple[torch.Tensor, torch.Tensor]:
        op = _ATEN._scaled_dot_product_efficient_attention  # noqa: SLF001
        out, lse, *_ = op(*inputs, None, True, 0.0, kind.causal, scale=kind.scale)
        return out, lse[..., : inputs[0].shape[-2]]

    def backward(
        self, gradient: torch.Tensor, inputs: Three, merged: tuple[torch.Tensor, ...], kind: Kind
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
    """What an out-of-tree device puts in the place torch has for it."""

    def forward(self, inputs: Three, kind: Kind) -> tuple[torch.Tensor, torch.Tensor]:
        op = _ATEN._scaled_dot_product_fused_attention_overrideable  # noqa: SLF001
        out, lse, *_ = op(*inputs, None, 0.0, kind.causal, scale=kind.scale)
        return out, lse

    def backward(
        self, gradient: torch.Tensor, inputs: Three, merged: tuple[torch.Tensor, ...], kind: Kind
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


def _choose(inputs: Three, kind: Kind) -> tuple[Kernel, Three, int]:
    """The kernel, what it is to be given, and how often keys' heads were repeated for it."""
    query, key, value = inputs
    groups = query.shape[1] // key.shape[1]
    kernel = _fused(inputs, kind)
    if kernel is not None or groups == 1:
        return kernel or TILED, inputs, 1
    repeated = (query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1))
    return _fused(repeated, kind) or TILED, repeated, groups


def _fused(inputs: Three, kind: Kind) -> Kernel | None:
    """What `scaled_dot_product_attention` would use, if it can be called by itself."""
    device = inputs[0].device.type
    if not has_kernel(device, "_fused_sdp_choice"):
        return None
    gqa = inputs[0].shape[1] != inputs[1].shape[1]
    was_on = torch.backends.cuda.cudnn_sdp_enabled()
    # cuDNN's is the only one left out: flash attention takes all that it takes
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
    """Whether the device has a kernel of its own for it; a fall-back to the CPU is none."""
    key = torch._C._dispatch_key_for_device(device)  # noqa: SLF001 - no public way to ask
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{operator}", key)  # noqa: SLF001


def _filled_up(x: torch.Tensor) -> torch.Tensor:
    rest = -x.shape[-1] % 8
    return F.pad(x, (0, rest)) if rest else x


def _seeds(like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of dropout, which there is none of: not looked at."""
    return (like.new_empty(0, dtype=torch.int64), like.new_empty(0, dtype=torch.int64))


def _added_up(gradient: torch.Tensor, groups: int) -> torch.Tensor:
    """Heads that were repeated have one gradient."""
    return gradient if groups == 1 else gradient.unflatten(1, (-1, groups)).sum(2)

"""Selective recomputation keeps what every device's attention gave."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from drivetrain.parallel.blocks import KEPT, recompute_blocks

# attention by name, and not to be kept: why
NOT_KEPT = {
    "aten::scaled_dot_product_attention": "is made of the others",
    "aten::_scaled_dot_product_attention_math": "is made of products, which are kept",
    "aten::_scaled_dot_product_attention_math_for_mps": "gives all scores, too large to keep",
    "aten::_native_multi_head_attention": "inference only: it has no backward",
    "aten::_triton_multi_head_attention": "inference only: it has no backward",
    "aten::_triton_scaled_dot_attention": "inference only: it has no backward",
    "aten::_flash_attention_forward_no_dropout_inplace": "writes into a tensor it is given",
    "aten::_transformer_encoder_layer_fwd": "inference only: it has no backward",
}


def attention_operators() -> set[str]:
    """All that torch has, without their backward."""
    names = {schema.name for schema in torch._C._jit_get_all_schemas()}
    return {
        name
        for name in names
        if name.startswith(("aten::", "torch_attn::"))
        and ("attention" in name or "_attn" in name)
        and not name.endswith("_backward")
    }


def test_every_attention_of_torchs_is_kept_or_left_out_for_a_reason() -> None:
    assert attention_operators() - set(NOT_KEPT) <= KEPT


class Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.project(x).unflatten(-1, (2, 4)).transpose(1, 2)
        attended = F.scaled_dot_product_attention(y, y, y, is_causal=True)
        gated: torch.Tensor = F.silu(attended.transpose(1, 2).flatten(2))
        return gated


@pytest.mark.parametrize(("how", "times"), [("selective", 2), ("full", 4)])
def test_attention_is_not_done_again(how: Any, times: int) -> None:
    model = Model()
    recompute_blocks(model, how)
    with Counted() as counted:
        model(torch.randn(1, 6, 8, requires_grad=True)).sum().backward()
    assert counted.names.count("aten::_scaled_dot_product_flash_attention_for_cpu") == times

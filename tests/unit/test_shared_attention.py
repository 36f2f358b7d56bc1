"""Attention to parts of the keys gives what attention to all of them gives, without its square."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from drivetrain.parallel import attention
from drivetrain.parallel.attention import AttentionKind

BATCH, HEADS, PARTS, PART = 2, 4, 3, 37
SCALE = 0.3


def made(
    dtype: torch.dtype, key_heads: int, size: int, value_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((HEADS, size), (key_heads, size), (key_heads, value_size))
    q, k, v = (
        torch.randn(BATCH, heads, PARTS * PART, s, generator=generator, dtype=torch.float64)
        .to(dtype)
        .requires_grad_()
        for heads, s in shapes
    )
    return q, k, v


def by_parts(
    inputs: tuple[torch.Tensor, ...], gradient: torch.Tensor, *, causal: bool
) -> list[torch.Tensor]:
    """Output and gradients, as the ranks would have them together."""
    q, k, v = (x.detach() for x in inputs)
    keys, values = (torch.stack(x.split(PART, -2)) for x in (k, v))
    outs, to_query = [], []
    to_keys, to_values = torch.zeros_like(keys), torch.zeros_like(values)
    for rank, (own, g) in enumerate(zip(q.split(PART, -2), gradient.split(PART, -2), strict=True)):
        own_part = rank if causal else None
        out, lse = attention.attend_to_parts(own, keys, values, own_part, SCALE)
        added = attention.attend_to_parts_backward(g, own, keys, values, out, lse, own_part, SCALE)
        outs.append(out)
        to_query.append(added[0])
        to_keys += added[1]
        to_values += added[2]
    return [
        torch.cat(outs, -2),
        torch.cat(to_query, -2),
        torch.cat(list(to_keys), -2),
        torch.cat(list(to_values), -2),
    ]


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("key_heads", [4, 2], ids=["multi-head", "grouped"])
@pytest.mark.parametrize("kernel", ["fused", "tiled"])
@pytest.mark.parametrize(
    ("size", "value_size", "dtype"),
    [
        (16, 16, torch.float32),
        (13, 13, torch.float32),
        (16, 8, torch.float32),
        (16, 16, torch.float64),
        (16, 16, torch.bfloat16),
    ],
)
def test_parts_give_what_the_whole_gives(
    kernel: str,
    key_heads: int,
    size: int,
    value_size: int,
    dtype: torch.dtype,
    causal: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if kernel == "tiled":
        monkeypatch.setattr(attention, "_fused", lambda *_: None)
        monkeypatch.setattr(attention, "TILE", 16)  # several tiles to a part, the last one short
    inputs = made(dtype, key_heads, size, value_size)
    q, k, v = (x.double() for x in inputs)
    exact = F.scaled_dot_product_attention(
        q, k, v, is_causal=causal, scale=SCALE, enable_gqa=key_heads < HEADS
    )
    gradient = torch.randn(exact.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = [exact, *torch.autograd.grad(exact, inputs, gradient.double())]
    # some tens of roundings of numbers of about 3; in bf16 each part's gradient is rounded
    tolerance = 50 * torch.finfo(dtype).eps if dtype != torch.bfloat16 else 0.06
    for got, wanted in zip(by_parts(inputs, gradient, causal=causal), expected, strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), wanted.double(), rtol=0, atol=tolerance)


def test_the_operators_are_what_torch_asks_of_operators() -> None:
    q, k, v = (x.detach()[..., :PART, :] for x in made(torch.float32, 2, 16, 16))
    keys, values = torch.stack([k, k]), torch.stack([v, v])
    out, lse = attention.attend_to_parts(q, keys, values, 1, SCALE)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(attention.attend_to_parts, (q, keys, values, 1, SCALE), test_utils=tests)
    given = (out, q, keys, values, out, lse, None, SCALE)
    torch.library.opcheck(attention.attend_to_parts_backward, given, test_utils=tests)


@pytest.mark.parametrize("backend", attention.KERNELS, ids=lambda backend: backend.name)
def test_other_devices_operators_take_what_they_are_given(backend: SDPBackend) -> None:
    # no such device here: torch's shape functions check the arguments, nothing is computed
    _, kernel = attention.KERNELS[backend]
    q = torch.empty(2, 4, 65, 24, device="meta", dtype=torch.bfloat16)
    few = torch.empty(2, 2, 65, 24, device="meta", dtype=torch.bfloat16)
    k = few if backend is SDPBackend.FLASH_ATTENTION else q
    out, lse = kernel.forward((q, k, k), AttentionKind(True, SCALE))
    assert (out.shape, lse.shape) == (q.shape, q.shape[:-1])
    gradients = kernel.backward(out, (q, k, k), (out, lse), AttentionKind(True, SCALE))
    assert [x.shape for x in gradients] == [q.shape, k.shape, k.shape]


def test_where_torch_has_no_kernel_tiles_do_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    forward = attention.tiled_forward

    def counted(*inputs: torch.Tensor, causal: bool, scale: float) -> Any:
        asked.append(len(inputs))
        return forward(*inputs, causal=causal, scale=scale)

    monkeypatch.setattr(attention, "tiled_forward", counted)
    q = torch.randn(1, 2, 8, 16)
    attention.attend((q, q, q), AttentionKind(True, SCALE))
    assert asked == []
    attention.attend((q, q, q[..., :8]), AttentionKind(True, SCALE))  # values of another size
    assert asked == [3]


def test_only_a_devices_own_kernels_count() -> None:
    assert attention.has_kernel("cpu", "_scaled_dot_product_flash_attention_for_cpu")
    assert not attention.has_kernel("cpu", "_scaled_dot_product_flash_attention")
    # torch has one that only raises, for devices that bring none
    assert not attention.has_kernel("cpu", "_scaled_dot_product_fused_attention_overrideable")

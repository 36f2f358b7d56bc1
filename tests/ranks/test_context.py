"""Context parallelism: memory that grows with the sequence, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from drivetrain.core.errors import WorkerFailure
from drivetrain.parallel.blocks import recompute_blocks
from drivetrain.parallel.context import share_sequences
from drivetrain.testing import run_ranks
from tests.gpt_task import GPT

RANKS = 2


class Largest(TorchDispatchMode):
    """The largest tensor that any operation gives."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "drivetrain":  # what it does inside counts too
            from drivetrain.parallel import attention

            with self:
                return getattr(attention, func._schema.name.split("::")[1])._init_fn(*args)
        given = func(*args, **(kwargs or {}))
        for tensor in tree_iter(given):
            if isinstance(tensor, torch.Tensor):
                self.num_bytes = max(self.num_bytes, tensor.untyped_storage().nbytes())
        return given


def narrow_gpt(length: int) -> GPT:
    model = GPT(width=8, layers=1, dropout=0.0)
    model.positions = nn.Embedding(length, 8)
    return model


def largest_tensor(length: int) -> int:
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("cp",))
    model = narrow_gpt(length)
    share_sequences(model, mesh["cp"])
    seen = Largest()
    with seen:
        model(torch.zeros(1, length, dtype=torch.long)).sum().backward()
    return seen.num_bytes


def test_memory_grows_with_the_sequence_not_with_its_square() -> None:
    short = max(run_ranks(largest_tensor, RANKS, args=(4096,)))
    long = max(run_ranks(largest_tensor, RANKS, args=(8192,)))
    assert long <= 2 * short


class Attending(nn.Module):
    """Attention with the given options, in a block."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_Block(options), _Block(options)])

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class _Block(nn.Module):
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.project, self.options = nn.Linear(16, 32), options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x).split([16, 8, 8], -1)
        q, k, v = (y.unflatten(-1, (-1, 4)).transpose(1, 2) for y in (q, k.float(), v))
        out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **self.options)
        assert out.dtype == q.dtype
        joint: torch.Tensor = out.transpose(1, 2).flatten(2)
        return joint


def losses(options: dict[str, Any], precision: torch.dtype, recompute: str) -> dict[str, Any]:
    """A step of the model in two parts, and of the same model in one."""
    found = {}
    for name in ("parts", "whole"):
        torch.manual_seed(0)
        model = Attending(**options)
        x = torch.randn(2, 10, 16)
        if name == "parts":
            mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("cp",))
            share_sequences(model, mesh["cp"])
        if recompute != "none":
            recompute_blocks(model, recompute)  # type: ignore[arg-type]
        with torch.autocast("cpu", precision, enabled=precision is not torch.float32):
            loss = model(x).float().square().sum()
        loss.backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        if name == "parts":  # each rank has what its part of the sequence adds
            for gradient in gradients:
                dist.all_reduce(gradient)
        found[name] = (loss.item(), [g.tolist() for g in gradients if g is not None])
    return found


@pytest.mark.parametrize(
    ("options", "precision", "recompute"),
    [
        ({"is_causal": True}, torch.float32, "none"),
        ({}, torch.float32, "none"),
        ({"is_causal": True, "scale": 0.7}, torch.float32, "full"),
        ({"is_causal": True}, torch.float32, "selective"),
        ({"is_causal": True}, torch.bfloat16, "none"),
    ],
)
def test_parts_train_what_the_whole_trains(
    options: dict[str, Any], precision: torch.dtype, recompute: str
) -> None:
    # a few roundings of each precision
    tolerance = 1e-5 if precision is torch.float32 else 3e-2
    for found in run_ranks(losses, RANKS, args=(options, precision, recompute)):
        (loss, gradients), (expected, wanted) = found["parts"], found["whole"]
        assert loss == pytest.approx(expected, rel=tolerance)
        for got, want in zip(gradients, wanted, strict=True):
            torch.testing.assert_close(
                torch.tensor(got), torch.tensor(want), rtol=tolerance, atol=tolerance * 10
            )


def refused(options: dict[str, Any]) -> None:
    losses(options, torch.float32, "none")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dropout_p": 0.1}, r"attention with dropout \(0.1\) cannot be split over ranks"),
        ({"attn_mask": torch.ones(5, 5, dtype=torch.bool)}, "an explicit mask"),
    ],
)
def test_what_cannot_be_shared_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(WorkerFailure, match=words):
        run_ranks(refused, RANKS, args=(options,))

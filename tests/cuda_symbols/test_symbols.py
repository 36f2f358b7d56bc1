"""Names that we ask a CUDA build for, and shapes on `cuda` without a device."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._C import _distributed_c10d
from torch._subclasses.fake_tensor import FakeTensorMode

import drivetrain
from drivetrain.supervise.failures import dump_responder

NCCL_OPTIONS: tuple[str, ...] = ()
"""Fields of ProcessGroupNCCL.Options that parallel/world.py sets; none today."""


def test_nccls_flight_recorder_is_there_and_read() -> None:
    trace = pickle.loads(_distributed_c10d._dump_nccl_trace())  # type: ignore[attr-defined] # noqa: S301
    assert trace["entries"] == []
    assert set(dump_responder._read()) == {"_dump_fr_trace", "_dump_nccl_trace"}
    store = _distributed_c10d.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        dist.all_reduce(torch.ones(3))
        told = dump_responder.latest_collectives()
    finally:
        dist.destroy_process_group()
    assert told is not None
    assert told["groups"] == {"default_pg (0)": [0]}
    assert [(call["op"], call["number"]) for call in told["calls"]] == [("all_reduce", 1)]


@pytest.mark.parametrize("name", NCCL_OPTIONS)
def test_nccls_options_have_what_we_set(name: str) -> None:
    assert hasattr(dist.ProcessGroupNCCL.Options(), name)


@pytest.mark.parametrize("name", drivetrain.__all__)
def test_public_names_import(name: str) -> None:
    assert getattr(drivetrain, name) is not None


class _Attention(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32, dtype=dtype)
        self.projection = nn.Linear(32, 96, dtype=dtype)
        self.head = nn.Linear(32, 50, dtype=dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        batch, length = ids.shape
        mixed = self.projection(self.embedding(ids)).view(batch, length, 3, 4, 8)
        query, key, value = mixed.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        logits: torch.Tensor = self.head(seen.transpose(1, 2).reshape(batch, length, 32))
        return logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_on_cuda_goes_through_its_loss_on_fake_tensors(dtype: torch.dtype) -> None:
    with FakeTensorMode(), torch.device("cuda"):
        ids = torch.zeros(2, 16, dtype=torch.int64)
        logits = _Attention(dtype)(ids)
        loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
    assert (logits.shape, logits.dtype, logits.device.type) == ((2, 16, 50), dtype, "cuda")
    assert (loss.shape, loss.device.type) == ((), "cuda")


def test_mixing_devices_raises_on_fake_tensors() -> None:
    with FakeTensorMode():
        there, here = torch.ones(2, 2, device="cuda"), torch.ones(2, 2)
        with pytest.raises(RuntimeError, match="device"):
            there @ here


def test_nothing_above_has_initialised_cuda() -> None:
    assert not torch.cuda.is_initialized()

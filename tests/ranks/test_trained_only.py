"""Checkpoints of what is trained: an adapter, killed and resumed on a base the script makes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils.data import TensorDataset

from drivetrain.checkpoint.frozen import FrozenBase, fingerprints
from drivetrain.checkpoint.locate import locate
from drivetrain.checkpoint.whole_tensors import WholeTensors
from drivetrain.core.errors import ConfigError
from drivetrain.record import session
from drivetrain.testing import run_ranks
from drivetrain.train.hooks import Hook
from drivetrain.train.saving.weights import weights_sha256
from drivetrain.train.task import Task
from drivetrain.train.trainer import Trainer
from tests.ranks.resuming import Interrupted

WIDTH = 24
FSDP = {"strategy": "fsdp"}


class LoRA(nn.Module):
    """A frozen layer and a product of two thin ones that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)
        self.norm = nn.BatchNorm1d(WIDTH)  # its statistics move, and are no parameters

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(self.base(x) + self.up(self.down(x)))
        return y


def adapted(spoilt: bool = False) -> nn.Module:
    model = nn.Sequential(LoRA(), nn.GELU(), LoRA())
    generator = torch.Generator().manual_seed(1)  # the base: from a file, in real life
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            parameter.data = torch.randn(parameter.shape, generator=generator) / WIDTH**0.5
            if spoilt and name == "2.base.weight":
                parameter.data[17, 5] += 1e-3
    return model


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[0].flip(1))


def samples() -> TensorDataset:
    return TensorDataset(torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(0)))


class _Stop(Hook):
    def __init__(self, step: int) -> None:
        self._step = step

    def on_train_batch_end(self, trainer: Trainer, step: int) -> None:
        if step == self._step:
            raise Interrupted


def train(
    folder: str, parallel: dict[str, Any], stops: int = 0, spoilt: bool = False, **checkpoint: Any
) -> str:
    os.environ[session.RUN_DIR], session._opened = folder, 0
    config = {
        "global_batch_size": 8,
        "micro_batch_size": 4,
        "max_steps": 8,
        "parallel": parallel,
        "record": {"progress": "none", "sinks": []},
        "checkpoint": {"every_steps": 2, "contents": "trained", **checkpoint},
    }
    trainer = Trainer(Task(lambda: adapted(spoilt), loss), config, hooks=[_Stop(stops)])
    if stops:
        with pytest.raises(Interrupted):
            trainer.fit(samples())
        return ""
    trainer.fit(samples())
    return weights_sha256(trainer.full_state_dict())


def on_ranks(output_dir: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, parallel in (("ddp", {}), ("fsdp", FSDP)):
        whole = train(f"{output_dir}/{name}-whole", parallel)
        train(f"{output_dir}/{name}", parallel, stops=5)
        found[name] = (whole, train(f"{output_dir}/{name}", parallel))
    train(f"{output_dir}/full", FSDP, save="full")
    # a base that is not the same, at a layout that is not either
    train(f"{output_dir}/other", {}, stops=5)
    with pytest.raises(ConfigError) as refused:
        train(f"{output_dir}/other", FSDP, spoilt=True)
    found["refused"] = str(refused.value)
    train(f"{output_dir}/other", FSDP)
    found["fingerprints"] = layouts_of_one_tensor()
    return found


def layouts_of_one_tensor() -> list[dict[str, str]]:
    whole = torch.randn(7, 10, generator=torch.Generator().manual_seed(3)).bfloat16()
    mesh = init_device_mesh("cpu", (2,))

    def total(values: list[float]) -> list[float]:
        numbers = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(numbers)
        added: list[float] = numbers.tolist()
        return added

    cuts = [distribute_tensor(whole, mesh, [each]) for each in (Shard(0), Shard(1), Replicate())]
    return [fingerprints({"w": tensor}, total) for tensor in (whole, *cuts)]


def stored(run: Path) -> list[str]:
    located = locate(str(run))
    return WholeTensors(located.storage, located.choose()).names()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    path = tmp_path_factory.mktemp("runs")
    return path, run_ranks(on_ranks, 2, 120, args=(str(path),))[0]


def test_a_killed_run_goes_on_to_the_last_bit(found: tuple[Path, dict[str, Any]]) -> None:
    for name in ("ddp", "fsdp"):
        whole, resumed = found[1][name]
        assert whole == resumed, name


def test_the_base_is_not_saved_and_buffers_are(found: tuple[Path, dict[str, Any]]) -> None:
    for name in ("ddp", "fsdp", "full"):
        names = stored(found[0] / name)
        weights = {each for each in names if each.startswith("model.")}
        assert weights == {f"model.{n}" for n in adapted().state_dict() if ".base." not in n}
        assert "optimizer.0.up.weight.exp_avg" in names
        left = torch.load(found[0] / name / "checkpoints" / "weights.pt", weights_only=True)
        assert {f"model.{each}" for each in left} == weights


def test_another_base_is_refused_by_name(found: tuple[Path, dict[str, Any]]) -> None:
    words = "2.base.weight: is frozen and differs from the base weights of step-"
    assert found[1]["refused"].startswith(words)


def test_a_fingerprint_knows_no_layout(found: tuple[Path, dict[str, Any]]) -> None:
    prints = found[1]["fingerprints"]
    assert prints == [prints[0]] * 4
    whole = torch.randn(7, 10, generator=torch.Generator().manual_seed(3)).bfloat16()

    def own(tensor: torch.Tensor) -> dict[str, str]:
        return fingerprints({"w": tensor}, lambda values: values)

    assert own(whole) == prints[0]
    assert own(whole.T.contiguous()) != prints[0]
    whole[[2, 3]] = whole[[3, 2]]
    assert own(whole) != prints[0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bool, torch.complex64, torch.int8])
def test_every_kind_of_number_has_one(dtype: torch.dtype) -> None:
    for tensor in (torch.ones(3, 5).to(dtype), torch.ones(()).to(dtype), torch.ones(0).to(dtype)):
        first = fingerprints({"w": tensor}, lambda values: values)
        if tensor.numel():
            tensor.reshape(-1)[-1] = 0
            assert fingerprints({"w": tensor}, lambda values: values) != first


def test_a_frozen_weight_that_moves_is_saved() -> None:
    """A teacher that follows the student, also where torch does not count it."""
    tensors = {name: torch.ones(4) for name in ("still", "counted", "behind")}
    base = FrozenBase(tensors, lambda values: values)
    tensors["counted"][1] = 2
    tensors["behind"].data.mul_(2)
    assert base.unchanged() == {"still"}

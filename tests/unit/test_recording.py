"""A model that is recorded while it is made has, in the end, the weights of one that is not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain.train.weights import recording
from drivetrain.train.weights.placing import place
from drivetrain.train.weights.recording import NotRecordable, RecordedWeights, Recording


class Applied(nn.Module):
    """Tied weights, a mask, a table that is not registered, and `apply`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(300, 32)
        self.blocks = nn.ModuleList(nn.Linear(32, 160) for _ in range(2))
        self.head = nn.Linear(32, 300, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.ones(80, 80).tril())
        self.angles = torch.outer(torch.arange(200.0), 1 / 10000 ** (torch.arange(32) / 32))
        self.table = torch.polar(torch.ones(200, 32), self.angles)
        self.apply(self._init)
        for name, parameter in self.named_parameters():
            if name.endswith("1.weight"):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2))

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.data.normal_(0, 0.02)


class InItself(nn.Module):
    """Everything in `__init__`; values are looked at; a part is frozen."""

    def __init__(self) -> None:
        super().__init__()
        rates = [rate.item() for rate in torch.linspace(0, 0.1, 12)]
        self.place = nn.Parameter(torch.randn(1, 60, 96) * rates[-1])
        nn.init.trunc_normal_(self.place, std=0.02, a=-0.03, b=0.03)  # draws again what is outside
        self.turn = nn.Linear(96, 64)
        nn.init.orthogonal_(self.turn.weight)
        self.patch = nn.Conv2d(3, 64, 8)
        self.norm = nn.BatchNorm2d(64)
        self.frozen = nn.Linear(96, 96).requires_grad_(False)


class Computed(nn.Module):
    """Weights from other weights, a stream of its own, and writing to parts."""

    def __init__(self) -> None:
        super().__init__()
        own = torch.Generator().manual_seed(3)
        self.first = nn.Parameter(torch.randn(80, 80))
        self.second = nn.Parameter(torch.empty(80, 80).uniform_(generator=own))
        with torch.no_grad():
            self.first[3:5] = 0
            self.first.diagonal().fill_(1)
            self.first.div_(self.first.norm())
        self.third = nn.Parameter(self.first.detach().t().contiguous().to(torch.bfloat16))
        given = torch.tensor(range(5000), dtype=torch.float32)
        self.fourth = nn.Parameter(given * 2)
        given.zero_()
        self.small = nn.Parameter(torch.randn(10))
        with torch.no_grad():
            self.small.copy_(self.first[0, :10])
        self.order = nn.Buffer(torch.randperm(9000))
        self.where = nn.Buffer((self.second > 0.9).nonzero())
        if float(self.first.detach().mean()) > 100:
            raise AssertionError


def encoder() -> nn.Module:
    """Its layers are copies of one."""
    layer = nn.TransformerEncoderLayer(32, 4, 160, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def in_half() -> nn.Module:
    return Applied().to(torch.bfloat16)


def loaded() -> nn.Module:
    model = nn.Linear(80, 80)
    model.load_state_dict({"weight": torch.ones(80, 80), "bias": torch.zeros(80)})
    return model


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    return tensors | dict(model.named_buffers(remove_duplicate=False))


def recorded(make: Callable[[], nn.Module], **how: Any) -> tuple[nn.Module, RecordedWeights]:
    torch.manual_seed(7)
    return Recording(**how).build(make)


@pytest.mark.parametrize(
    "make", [Applied, InItself, Computed, encoder, in_half, loaded, lambda: nn.LSTM(64, 64, 2)]
)
@pytest.mark.parametrize("small", [4096, 0])
def test_weights_are_those_of_plain_torch(
    make: Callable[[], nn.Module], small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "SMALL", small)
    torch.manual_seed(7)
    plain, goes_on = make(), torch.rand(1)
    model, weights = recorded(make)
    assert torch.equal(torch.rand(1), goes_on)
    metas = tensors_of(model)
    assert all(tensor.is_meta for tensor in metas.values())
    cpu = torch.device("cpu")
    place(model, weights, cpu, cpu)
    made, expected = tensors_of(model), tensors_of(plain)
    assert list(made) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(made[name], tensor), name
        assert made[name].dtype == tensor.dtype
        assert made[name].requires_grad == tensor.requires_grad
        for other in expected:
            assert (made[name] is made[other]) == (tensor is expected[other])
    if isinstance(plain, Applied):
        assert torch.equal(model.table, plain.table)  # type: ignore[arg-type]


def test_keys_draw_the_same_whoever_asks_first() -> None:
    models = [recorded(Applied, seed_of=lambda n: 1000 + n) for _ in range(2)]
    names = list(tensors_of(models[0][0]))
    forward = {name: models[0][1].part(name, ()) for name in names}
    back = {name: models[1][1].part(name, ()) for name in reversed(names)}
    assert all(torch.equal(forward[name], back[name]) for name in names)
    assert not torch.equal(forward["embed.weight"], recorded(Applied)[1].part("embed.weight", ()))
    assert not torch.equal(forward["blocks.0.weight"], forward["blocks.1.weight"])


def test_what_cannot_be_made_later_is_said() -> None:
    kept = []

    def keeps() -> nn.Module:
        model = nn.Linear(100, 100)
        kept.append(model.weight.detach())
        return model

    with pytest.raises(NotRecordable, match="kept outside"):
        recorded(keeps)
    with pytest.raises(NotRecordable, match="weight is on the meta device"):
        recorded(lambda: nn.Linear(100, 100, device="meta"))
    with pytest.raises(RuntimeError):
        recorded(lambda: nn.Linear(int(torch.ones(100, 100).numpy().sum()), 1))


def test_a_recording_differs_where_what_was_read_differs() -> None:
    def reads(value: float) -> str:
        def make() -> nn.Module:
            model = nn.Linear(100, 100)
            model.load_state_dict(
                {"weight": torch.full((100, 100), value), "bias": torch.ones(100)}
            )
            return model

        return recorded(make)[1].digest

    assert reads(1.0) == reads(1.0) != reads(2.0)


def test_that_drawing_takes_long_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "_LONG_S", 0.0)
    said = []
    for how in (None, lambda n: n):
        each = Recording(how)
        each.when_long = lambda: said.append(1)
        each.build(Applied)
    assert said == [1]  # with keys, nothing is drawn that is dropped

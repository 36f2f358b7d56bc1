"""A model with an adapter of peft's on it: what is the adapter's, and what the rest is called.

peft wraps the model, and each layer that it adapts: `layers.0.q_proj.weight` becomes
`base_model.model.layers.0.q_proj.base_layer.weight`, with the adapter's tensors beside it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from drivetrain.parallel.model import Wanted, own_name

_PREFIX = "base_model.model."
_INSIDE = re.compile(r"\.(?:base_layer|original_module|modules_to_save\.[^.]+)(?=\.)")


def is_adapter(model: nn.Module) -> bool:
    """Whether peft has put an adapter on it."""
    return hasattr(model, "save_pretrained") and bool(_configs(model))


def base_name(model: nn.Module, name: str) -> str:
    """What a tensor is called in the model that the adapter was put on."""
    if not is_adapter(model):
        return name
    return _INSIDE.sub("", name.removeprefix(_PREFIX))


def of_adapter(model: nn.Module) -> Wanted:
    """What is trained, and what the library calls its own."""
    trained = {own_name(name) for name, p in model.named_parameters() if p.requires_grad}
    marks = {"modules_to_save", _mark(model)}
    return lambda name: name in trained or any(mark in name for mark in marks)


def is_new(model: nn.Module, name: str) -> bool:
    """Whether only the adapter has it: files of the model without one cannot."""
    return is_adapter(model) and _mark(model) in name


def _configs(model: nn.Module) -> dict[str, Any]:
    """Of its adapters, by name."""
    return dict(getattr(model, "peft_config", None) or {})


def _mark(model: nn.Module) -> str:
    return getattr(getattr(model, "base_model", None), "prefix", "") or "lora_"


def why_not_merged(model: nn.Module) -> str:
    """Why its adapter cannot be put into the weights here; empty where it can."""
    kinds = _configs(model)
    if len(kinds) != 1:
        return f"there are {len(kinds)} adapters, not one"
    (config,) = kinds.values()
    if str(getattr(config.peft_type, "value", config.peft_type)) != "LORA":
        return f"the adapter is {config.peft_type}, not LoRA"
    if config.use_dora or getattr(config, "lora_bias", False):
        return "the adapter is more than a product of two matrices (use_dora, lora_bias)"
    others = [name for name, layer in _layers(model) if not isinstance(layer.base_layer, nn.Linear)]
    return f"{others[0]} is no linear layer" if others else ""


class Merger:
    """Puts a LoRA adapter into the weights: W + scaling × B A, tensor by tensor as they come."""

    def __init__(self, model: nn.Module, put: Callable[[str, torch.Tensor], None]) -> None:
        self._model = model
        self._put = put
        self._adapter = next(iter(_configs(model)))
        self._scaling = {own_name(n): each.scaling[self._adapter] for n, each in _layers(model)}
        self._held: dict[str, dict[str, torch.Tensor]] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """The next one; it may change after this."""
        layer, part = self._place(name)
        if layer:
            held = self._held.setdefault(layer, {})
            held[part] = tensor.detach().to("cpu", copy=True)
            if len(held) == 3:
                self._put(base_name(self._model, f"{layer}.weight"), self._merged(layer))
        elif ".original_module." not in name:  # what is trained in its place is written
            self._put(base_name(self._model, name), tensor)

    def _place(self, name: str) -> tuple[str, str]:
        """The adapted layer that it belongs to, and which of the three it is; or nothing."""
        parts = {"base_layer.weight": "W"}
        parts |= {f"lora_{which}.{self._adapter}.weight": which for which in "AB"}
        for end, part in parts.items():
            layer = name.removesuffix(f".{end}")
            if layer != name and layer in self._scaling:
                return layer, part
        return "", ""

    def _merged(self, layer: str) -> torch.Tensor:
        held = self._held.pop(layer)
        change = (held["B"] @ held["A"]) * self._scaling[layer]
        merged: torch.Tensor = held["W"] + change.to(held["W"].dtype)
        return merged


def _layers(model: nn.Module) -> list[tuple[str, Any]]:
    """Those with a LoRA adapter, by name."""
    named = model.named_modules()
    return [(n, m) for n, m in named if hasattr(m, "lora_A") and hasattr(m, "base_layer")]

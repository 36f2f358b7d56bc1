"""A model with a peft adapter: which tensors are the adapter's, and the names of the others.

peft wraps the model and each layer that it adapts: `layers.0.q_proj.weight` becomes
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
    """True if the model has a peft adapter."""
    return hasattr(model, "save_pretrained") and bool(_configs(model))


def base_name(model: nn.Module, name: str) -> str:
    """Return a tensor's name in the model without the adapter."""
    if not is_adapter(model):
        return name
    return _INSIDE.sub("", name.removeprefix(_PREFIX))


def of_adapter(model: nn.Module) -> Wanted:
    """Return a filter for the trained tensors and those that peft treats as the adapter's."""
    trained = {own_name(name) for name, p in model.named_parameters() if p.requires_grad}
    marks = {"modules_to_save", _mark(model)}
    return lambda name: name in trained or any(mark in name for mark in marks)


def is_new(model: nn.Module, name: str) -> bool:
    """True for a tensor of the adapter itself, which files of the base model do not have."""
    return is_adapter(model) and _mark(model) in name


def _configs(model: nn.Module) -> dict[str, Any]:
    """Return the configs of the model's adapters, by name."""
    return dict(getattr(model, "peft_config", None) or {})


def _mark(model: nn.Module) -> str:
    return getattr(getattr(model, "base_model", None), "prefix", "") or "lora_"


def why_not_merged(model: nn.Module) -> str:
    """Return why the adapter cannot be merged into the weights; empty if it can."""
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
    """Merges a LoRA adapter into the weights (W + scaling × B A), tensor by tensor."""

    def __init__(self, model: nn.Module, put: Callable[[str, torch.Tensor], None]) -> None:
        self._model = model
        self._put = put
        self._adapter = next(iter(_configs(model)))
        self._scaling = {own_name(n): each.scaling[self._adapter] for n, each in _layers(model)}
        self._held: dict[str, dict[str, torch.Tensor]] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Add the next tensor; it is copied, so it may change afterwards."""
        layer, part = self._place(name)
        if layer:
            held = self._held.setdefault(layer, {})
            held[part] = tensor.detach().to("cpu", copy=True)
            if len(held) == 3:
                self._put(base_name(self._model, f"{layer}.weight"), self._merged(layer))
        elif ".original_module." not in name:  # its trained replacement is written instead
            self._put(base_name(self._model, name), tensor)

    def _place(self, name: str) -> tuple[str, str]:
        """Return the adapted layer of a tensor and its role (W, A or B), or empty strings."""
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
    """Return the layers with a LoRA adapter, by name."""
    named = model.named_modules()
    return [(n, m) for n, m in named if hasattr(m, "lora_A") and hasattr(m, "base_layer")]

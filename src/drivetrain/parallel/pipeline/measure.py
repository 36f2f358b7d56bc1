"""What each part of a model costs, measured, so that stages can be balanced by it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from drivetrain.parallel.accelerator import accelerator_of
from drivetrain.parallel.pipeline.anatomy import anatomy_of

_WARM_UP, _TIMED = 1, 3


def part_costs(model: nn.Module, call: Callable[[nn.Module], Any]) -> dict[str, float]:
    """Seconds in forward, by module name; `call` puts a micro-batch through the model."""
    anatomy = anatomy_of(model)
    device = next(model.parameters()).device
    began: dict[str, float] = {}
    spent: dict[str, float] = {}

    def start(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            began[name] = time.perf_counter()

        return hook

    def stop(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            accelerator_of(device).synchronize()
            spent[name] = spent.get(name, 0.0) + time.perf_counter() - began[name]

        return hook

    handles = []
    for name in (*anatomy.front, *anatomy.blocks, *anatomy.back):
        module = model.get_submodule(name)
        handles.append(module.register_forward_pre_hook(start(name)))
        handles.append(module.register_forward_hook(stop(name)))
    was_training = model.training
    model.eval()  # or running statistics would count it
    try:
        with torch.no_grad():
            for turn in range(_WARM_UP + _TIMED):
                if turn == _WARM_UP:
                    spent.clear()
                call(model)
    finally:
        model.train(was_training)
        for handle in handles:
            handle.remove()
    return spent

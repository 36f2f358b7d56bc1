"""Where torch's own code does not get along with fake tensors, or with thousands of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def moving_modules() -> Iterator[None]:
    """`module.to(…)` makes new parameters: torch would swap contents, which fakes do not allow."""
    original = nn.Module._apply  # noqa: SLF001

    def apply(module: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
        for each in module.modules() if recurse else (module,):
            for name, weight in list(each.named_parameters(recurse=False)):
                with torch.no_grad():
                    moved = fn(weight)
                if moved is not weight:
                    each.register_parameter(name, nn.Parameter(moved, weight.requires_grad))
            for name, buffer in list(each.named_buffers(recurse=False)):
                setattr(each, name, fn(buffer))
        return module

    nn.Module._apply = apply  # type: ignore[method-assign]  # noqa: SLF001
    try:
        yield
    finally:
        nn.Module._apply = original  # type: ignore[method-assign]  # noqa: SLF001

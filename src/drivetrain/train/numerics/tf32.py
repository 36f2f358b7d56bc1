"""TF32: whether fp32 matrix products and convolutions may round their inputs to 10 bits.

torch has two interfaces for it, and refuses to read the old one once the new one was written, which
torch.compile does. The old setters update both, so this module writes with the old interface and
reads with the new one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch

from drivetrain.core.errors import EnvironmentProblem, Problem


@contextmanager
def tf32(allowed: bool | None) -> Iterator[None]:
    """Context with TF32 on or off; None leaves torch's settings unchanged."""
    if allowed is None:
        yield
        return
    put_back = _remember()
    _set("high" if allowed else "highest", convolutions=allowed)
    try:
        _check(allowed=allowed)
        yield
    finally:
        put_back()


def _set(products: str, *, convolutions: bool) -> None:
    with warnings.catch_warnings():  # torch 2.9 warns once to use the new interface
        warnings.simplefilter("ignore")
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions


def _remember() -> Callable[[], None]:
    try:
        products = torch.get_float32_matmul_precision()
        convolutions = bool(torch.backends.cudnn.allow_tf32)
    except RuntimeError:  # the script has used the new interface
        return _remember_new()
    return lambda: _set(products, convolutions=convolutions)


def _remember_new() -> Callable[[], None]:
    flags = _flags()
    before = [flag.fp32_precision for flag in flags]

    def put_back() -> None:
        for flag, value in zip(flags, before, strict=True):
            flag.fp32_precision = value

    return put_back


def _flags() -> list[Any]:
    cudnn: Any = torch.backends.cudnn
    return [torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn]


def _check(*, allowed: bool) -> None:
    """Check what torch will do: torch.backends.fp32_precision may override all backends."""
    found = {flag.fp32_precision for flag in _flags()}
    everywhere = cast("Any", torch.backends).fp32_precision
    if found != {"tf32"} if allowed else "tf32" in found:
        problem = Problem(
            "precision.tf32",
            f"torch.backends.fp32_precision is {everywhere!r} in this process",
            "let the config set it, or leave precision.tf32 out",
            allowed,
        )
        raise EnvironmentProblem([problem])

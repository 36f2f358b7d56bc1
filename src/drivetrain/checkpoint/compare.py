"""Compare two checkpoints, tensor by tensor and value by value.

The time and the attempt are not compared: a run that was killed and resumed should equal one that
was not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from drivetrain.checkpoint.manifest import Manifest
from drivetrain.checkpoint.state import is_own, unpack
from drivetrain.checkpoint.storage import Storage
from drivetrain.checkpoint.whole_tensors import WholeTensors

_COMPARED = ("step", "contents", "strategy", "layout", "position", "values", "versions")
_AT_ONCE = 1 << 22
"""Elements converted to float64 at a time, so that memory is twice the tensor, not six times."""
_ABSENT = "absent"


@dataclass(frozen=True)
class Difference:
    """One tensor or value that differs."""

    name: str
    what: str
    """shape, dtype, numbers, value, only here, or only there."""
    here: str
    """Its form or value in the first; for numbers, how many of them differ."""
    there: str
    max_abs: float | None = None
    """The largest absolute difference, for tensors of the same shape and dtype."""


@dataclass(frozen=True)
class Comparison:
    """The result of comparing two checkpoints."""

    num_identical: int
    """Number of tensors that are equal bit for bit."""
    differences: tuple[Difference, ...]

    @property
    def is_same(self) -> bool:
        """True if nothing differs."""
        return not self.differences


def compare(here: tuple[Storage, Manifest], there: tuple[Storage, Manifest]) -> Comparison:
    """Return all differences; at most one tensor of each checkpoint is in memory."""
    left, right = WholeTensors(*here), WholeTensors(*there)
    differences = [*_values(_plain(here[1]), _plain(there[1]))]
    num_identical = 0
    names = dict.fromkeys((*left.names(), *right.names()))
    for name in names:
        found = list(_tensor(name, left, right))
        differences += found
        num_identical += not found
    return Comparison(num_identical, tuple(differences))


def _plain(manifest: Manifest) -> dict[str, Any]:
    body = asdict(manifest)
    return {key: body[key] for key in _COMPARED}


def _tensor(name: str, left: WholeTensors, right: WholeTensors) -> Iterator[Difference]:
    has = [name in side.names() for side in (left, right)]
    if not all(has):
        form = _form(left if has[0] else right, name)
        shown = (form, _ABSENT) if has[0] else (_ABSENT, form)
        yield Difference(name, "only here" if has[0] else "only there", *shown)
        return
    if is_own(name):
        yield from _values(unpack(left.read(name)), unpack(right.read(name)), name)
        return
    forms = (left.shape(name), right.shape(name)), (left.dtype(name), right.dtype(name))
    for what, (ours, theirs) in zip(("shape", "dtype"), forms, strict=True):
        if ours != theirs:
            yield Difference(name, what, _form(left, name), _form(right, name))
            return
    yield from _numbers(name, left.read(name), right.read(name))


def _form(side: WholeTensors, name: str) -> str:
    dtype = str(side.dtype(name)).removeprefix("torch.")
    return f"{dtype}{list(side.shape(name))}"


def _numbers(name: str, ours: torch.Tensor, theirs: torch.Tensor) -> Iterator[Difference]:
    if _same_bits(ours, theirs):
        return
    num_different, largest = 0, 0.0
    parts = (tensor.reshape(-1).split(_AT_ONCE) for tensor in (ours, theirs))
    for a, b in zip(*parts, strict=True):
        where = (_bits(a) != _bits(b)).any(1)
        num_different += int(where.sum())
        largest = _larger(largest, (a.to(_wide(a)) - b.to(_wide(b)))[where].abs())
    share = f"{num_different:,} of {ours.numel():,} numbers"
    yield Difference(name, "numbers", share, "", largest)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compare the bits: a NaN equals the same NaN, and -0 differs from 0."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bits(a), _bits(b))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return one row of bytes per number."""
    flat = tensor.contiguous().reshape(-1)
    return flat.view(torch.uint8).reshape(flat.numel(), tensor.dtype.itemsize)


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.complex128 if tensor.is_complex() else torch.float64


def _larger(largest: float, gaps: torch.Tensor) -> float:
    """Return the larger value; NaN counts as the largest."""
    if not gaps.numel():
        return largest
    found = float(gaps.max())
    return found if math.isnan(found) or found > largest else largest


def _values(ours: Any, theirs: Any, path: str = "") -> Iterator[Difference]:
    """Compare nested plain values, leaf by leaf."""
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        keys = dict.fromkeys((*ours, *theirs))
        for key in keys:
            inner = f"{path}.{key}" if path else str(key)
            yield from _values(ours.get(key, _ABSENT), theirs.get(key, _ABSENT), inner)
    elif _is_list(ours) and _is_list(theirs) and len(ours) == len(theirs):
        for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            yield from _values(a, b, f"{path}.{index}")
    elif not _same(ours, theirs):
        yield Difference(path, "value", _shown(ours), _shown(theirs))


def _is_list(value: Any) -> bool:
    """True for lists compared by entry; the hundreds of numbers of a random state are one value."""
    return isinstance(value, (list, tuple)) and len(value) <= 32


def _same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
        return _same_bits(ours, theirs)
    if isinstance(ours, torch.Tensor) or isinstance(theirs, torch.Tensor):
        return False
    return bool(ours == theirs or (ours != ours and theirs != theirs))  # noqa: PLR0124 - NaN


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of {value.numel():,}"
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "..."

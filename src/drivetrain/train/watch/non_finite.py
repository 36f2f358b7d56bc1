"""NonFiniteWatch: stop a run at a NaN or infinite loss, before it reaches the weights.

A finite loss costs one look at a number that is already on the host. For any other, if the rank has
the whole model, the micro-batch is run again with every operation watched, and the first operation
with finite inputs and an output that is not finite is recorded: operation, module, line, rank, step
and samples. If the loss is on a device, reading it would synchronize every step; then it is found
when it is logged, some steps later.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten_with_path, tree_leaves

from drivetrain.core.errors import NonFiniteLoss
from drivetrain.core.files import write_whole
from drivetrain.parallel.gather import alone
from drivetrain.parallel.parts import own_part
from drivetrain.train.assemble import Assembly
from drivetrain.train.refusals import check_loss
from drivetrain.train.task import Loss, LossAndParts, Task, Total, split
from drivetrain.train.watch.remedies import for_input, for_operation, for_parameter

_FILLS = ("empty", "fill", "full", "where", "new_", "zeros", "ones")
"""Operations that write given values (a mask of -inf), or leave memory uninitialized."""
_FRAMES = 40
_UNLOCATED = "the loss"


def has_whole_loss_on_host(assembly: Assembly) -> bool:
    """True if checking each loss costs nothing.

    The fp16 scaler expects occasional infinities; a pipeline stage and a tensor-parallel rank do
    not have the whole loss.
    """
    parallel = assembly.config.parallel
    is_whole = parallel.pp == 1 and parallel.tp == 1
    return is_whole and assembly.world.accelerator.is_cpu and assembly.engine.scaler is None


@dataclass
class NonFiniteWatch:
    """Wraps the user's loss function to check each loss."""

    rank: int
    folder: Path
    """Directory of the reports: attempts/<n>/non_finite."""
    step: Callable[[], int]
    """Returns the number of completed steps."""
    sample_ids: Callable[[int], list[int]]
    """Returns this rank's samples in a step; empty for a stream."""
    micro_batch_size: int
    inner: nn.Module
    """The user's own module."""
    num_losses: Callable[[], int]
    """Returns how many micro-batches with samples were computed in this step."""
    is_whole: bool
    """Whether the model computes without communication, so that this rank can rerun it alone."""
    settings: str
    """The settings that can keep a loss finite."""

    def over(self, task: Task) -> Task:
        """Return the task with its loss checked."""

        def loss(model: nn.Module, batch: Any) -> Loss | LossAndParts:
            found = task.loss(model, batch)
            check_loss(found)
            whole, _ = split(found)
            value = (whole.sum if isinstance(whole, Total) else whole).item()
            if not math.isfinite(value):
                raise self._stop(task, batch, value)
            return found

        return replace(task, loss=loss)

    def _stop(self, task: Task, batch: Any, value: float) -> NonFiniteLoss:
        first = self.num_losses() * self.micro_batch_size
        ids = self.sample_ids(self.step())[first : first + self.micro_batch_size]
        operation = None
        if self.is_whole:
            operation = _rerun(self.inner, task, batch, nan=math.isnan(value))
        report = {
            **_describe(self.inner, operation, batch, value),
            "step": self.step() + 1,
            "rank": self.rank,
            "loss": str(value),
        }
        bad_rows = report.pop("rows")
        chosen = [ids[row] for row in bad_rows if row < len(ids)] if bad_rows else ids
        report["sample_ids"] = chosen
        report["remedy"] = remedy = self._remedy(report)
        write_whole(self.folder / f"{self.rank:05d}.json", json.dumps(report, indent=2) + "\n")
        first_in = "" if report["what"] == _UNLOCATED else f", first in {report['what']}"
        samples = f" (samples {chosen[:8]}{'…' * (len(chosen) > 8)})" if chosen else ""
        return NonFiniteLoss(
            f"train/loss = {value} at step {report['step']} on rank {self.rank}: the loss is not "
            f"finite{first_in}{samples}; {remedy}"
        )

    def _remedy(self, report: dict[str, Any]) -> str:
        found_in, name = report["found_in"], report["name"]
        if found_in == "input":
            return for_input(has_ids=bool(report["sample_ids"]))
        if found_in == "parameter":
            return for_parameter(report["step"], self.settings)
        if report["operation"]:
            where = f"module {name}" if found_in == "module" else name
            return for_operation(where, self.settings)
        return for_operation("the model and the loss function", self.settings)


def _describe(
    inner: nn.Module, operation: _Operation | None, batch: Any, value: float
) -> dict[str, Any]:
    """Describe where the value came from: the batch, a parameter or an operation."""
    rows: list[int] = []
    found_in, name, tensor, frames = "loss", "loss", torch.tensor(value), []
    bad_parameter = next(((n, p) for n, p in inner.named_parameters() if _is_bad(p)), None)
    bad_input = _bad_input(batch)
    if bad_input is not None:
        found_in, (name, tensor) = "input", bad_input
        rows = _bad_rows(tensor)
        what = f"the batch itself ({name})"
    elif bad_parameter is not None:
        found_in, (name, tensor) = "parameter", bad_parameter
        what = f"the parameter {name}"
    elif operation is not None:
        found_in = "module" if operation.module else "loss"
        name, tensor = operation.module or "the loss function", operation.output
        what = f"the output of {operation.name} in {name}"
    else:
        what = _UNLOCATED
    if operation is not None:
        frames = operation.frames
    local = own_part(tensor).detach()
    return {
        "found_in": found_in,
        "name": name,
        "what": what,
        "module": operation.module if operation else "",
        "operation": operation.name if operation else "",
        "frames": frames,
        "num_nan": int(local.isnan().sum()),
        "num_inf": int(local.isinf().sum()),
        "num_elements": local.numel(),
        "rows": rows,
    }


@dataclass(frozen=True)
class _Operation:
    name: str
    module: str
    output: torch.Tensor
    frames: list[tuple[str, int, str]]


def _rerun(inner: nn.Module, task: Task, batch: Any, *, nan: bool) -> _Operation | None:
    with _names(inner) as current:
        first = _FirstBad(current, nan=nan)
        with first, alone():  # other ranks may have found nothing
            task.loss(inner, batch)
    return first.found


class _FirstBad(TorchDispatchMode):
    """Finds the first operation whose output is not finite although its inputs are."""

    def __init__(self, current: list[str], *, nan: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._current = current
        self._is_bad = _has_nan if nan else _is_bad
        self.found: _Operation | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # torch's own interface
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if _is_float(leaf)]
        were_bad = self.found is None and any(self._is_bad(tensor) for tensor in inputs)
        result = func(*args, **(kwargs or {}))
        name = str(func.overloadpacket).removeprefix("aten.")
        if self.found is None and not were_bad and not name.startswith(_FILLS):
            outputs = [leaf for leaf in tree_leaves(result) if _is_float(leaf)]
            bad = next((tensor for tensor in outputs if self._is_bad(tensor)), None)
            if bad is not None:
                module = self._current[-1] if self._current else ""
                self.found = _Operation(name, module, bad.detach().clone(), _frames())
        return result


@contextmanager
def _names(model: nn.Module) -> Iterator[list[str]]:
    """Context that tracks the names of the modules being called, outermost first."""
    current: list[str] = []
    handles = []
    for name, module in model.named_modules():
        shown = name or type(module).__name__
        handles.append(module.register_forward_pre_hook(lambda *_, n=shown: current.append(n)))
        handles.append(
            module.register_forward_hook(lambda *_: current.pop() and None, always_call=True)
        )
    try:
        yield current
    finally:
        for handle in handles:
            handle.remove()


def _frames() -> list[tuple[str, int, str]]:
    """Return the call stack, innermost first."""
    frame: FrameType | None = sys._getframe(2)  # noqa: SLF001 - formats nothing
    frames: list[tuple[str, int, str]] = []
    while frame is not None and len(frames) < _FRAMES:
        frames.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return frames


def _bad_input(batch: Any) -> tuple[str, torch.Tensor] | None:
    for path, leaf in tree_flatten_with_path(batch)[0]:
        if _is_float(leaf) and _is_bad(leaf):
            return "batch" + "".join(map(str, path)), leaf
    return None


def _bad_rows(tensor: torch.Tensor) -> list[int]:
    if tensor.dim() == 0:
        return []
    bad = ~tensor.isfinite().flatten(1).all(1) if tensor.dim() > 1 else ~tensor.isfinite()
    rows: list[int] = bad.nonzero().flatten().tolist()
    return rows


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()


def _is_bad(tensor: torch.Tensor) -> bool:
    return not bool(own_part(tensor).detach().isfinite().all())


def _has_nan(tensor: torch.Tensor) -> bool:
    return bool(tensor.detach().isnan().any())

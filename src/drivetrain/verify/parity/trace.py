"""Hooks that a comparison adds to the runs it compares: two that change them, and the Trace."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch
import torch.nn.functional as F
from torch import nn

from drivetrain.data.batches import MicroBatch
from drivetrain.parallel.parts import whole
from drivetrain.parallel.pipeline.pipelined import Pipelined
from drivetrain.train.engine import Engine
from drivetrain.train.hooks import Hook
from drivetrain.train.task import Loss, Task, Total
from drivetrain.train.trainer import Trainer
from drivetrain.verify.parity.fingerprint import Fingerprint, fingerprint, of_number

# Hooks that change the compared runs.

_UNITS = 4
"""Units in the last place: somewhat more than a layout changes, so that chaos is not missed."""


class Nudged(Hook):
    """Changes the last bits of the gradients, in the same way in every run.

    Another layout adds the same terms in another order: only last bits differ. If that alone makes
    one process diverge from itself, as with a ReLU whose input 1e-9 moves across 0, a late
    divergence gives no information about the layout.
    """

    def on_before_optimizer_step(self, trainer: Trainer, step: int) -> None:
        """Move each element by up to a few units in its last place."""
        if trainer.assembly is None:
            return
        generator = torch.Generator().manual_seed(step - 1)
        for parameter in trainer.assembly.engine.spread.inner.parameters():
            gradient = parameter.grad
            if gradient is None:
                continue
            units = torch.randint(-_UNITS, _UNITS + 1, gradient.shape, generator=generator)
            gradient.mul_(1 + torch.finfo(gradient.dtype).eps * units.to(gradient))


class WithoutDropout(Hook):
    """Switches dropout off in this process, for comparisons in which it cannot be the same.

    Ranks that share a layer, a sequence or a model's depth draw masks for their own part. That is
    correct, but they are not the masks that one device would have drawn.
    """

    def on_fit_start(self, trainer: Trainer) -> None:  # noqa: ARG002
        """Replace F.dropout, which nn.Dropout calls, and attention's own dropout."""
        attend = F.scaled_dot_product_attention

        def without(*args: Any, **kwargs: Any) -> torch.Tensor:
            kwargs.pop("dropout_p", None)
            attended: torch.Tensor = attend(*args[:4], **kwargs)
            return attended

        F.dropout = _unchanged  # type: ignore[assignment]
        if not isinstance(attend, type(without)):
            F.scaled_dot_product_attention = without


def _unchanged(x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return x


# Trace: a hook that records the values of every module and every parameter.
#
# One file per rank, one line per value, in the order of execution: for each micro-batch its data,
# each module's output and the loss; then the gradients after backward (last layer first), the
# gradients that the optimizer gets, and its updates of the weights.

FOLDER, LAST_STEP = "DRIVETRAIN_PARITY_FOLDER", "DRIVETRAIN_PARITY_LAST_STEP"
NO_MICRO_BATCH = -1
_FAINT = 1e-4
"""An element of a gradient this much smaller than usual in the model is mostly rounding error, but
Adam still makes a full step of it."""
_WRAPPERS = frozenset({"_checkpoint_wrapped_module", "_orig_mod"})


class TraceStage(StrEnum):
    """The part of training in which a value was recorded."""

    UNSEEN = "not seen"
    """No gradients: an engine or servers handle them."""
    START = "initial weights"
    MEMBERS = "optimizer members"
    DATA = "data"
    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"
    CLIPPING = "clipping"
    SETTINGS = "optimizer settings"
    UPDATE = "optimizer step"


class Key(NamedTuple):
    """Where a value was recorded; the same on any number of ranks."""

    step: int
    """Counted from 1; 0 is before the first step."""
    stage: TraceStage
    place: str
    """Name of a module, a parameter or another value."""
    micro: int
    """Index of the micro-batch in its step, or NO_MICRO_BATCH."""


class TraceEntry(NamedTuple):
    """One line of a trace."""

    key: Key
    value: Fingerprint


class Trace(Hook):
    """Added to a run by DRIVETRAIN_HOOKS; it only costs the run time."""

    def __init__(self, folder: Path | None = None, last_step: int | None = None) -> None:
        self._folder = Path(os.environ[FOLDER]) if folder is None else folder
        self._last_step = int(os.environ[LAST_STEP]) if last_step is None else last_step
        self._file: TextIO | None = None
        self._step = 0
        self._micro: MicroBatch | None = None
        self._in_loss = False
        self._calls: Counter[str] = Counter()
        self._begun: dict[str, int] = {}
        """Module → position in the order of first calls."""
        self._parameters: dict[str, nn.Parameter] = {}
        self._before: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        """Parameter → its weights and its faint elements, before the optimizer's step."""

    def on_fit_start(self, trainer: Trainer) -> None:
        """Register all hooks, and record the initial state."""
        if trainer.assembly is None:
            return
        engine, model = trainer.assembly.engine, trainer.model
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"trace-{trainer.assembly.world.identity.rank:05d}.jsonl"
        self._file = open(path, "w")  # noqa: SIM115 - closed by on_fit_end
        trained = ((n, p) for n, p in model.named_parameters() if p.requires_grad)
        self._parameters = {own_name(name): parameter for name, parameter in trained}
        if engine.spread.engine_step is not None:
            self._note(TraceStage.UNSEEN, "gradients", of_number(1.0))
        self._note_all(TraceStage.START, self._parameters)
        held = {id(p) for group in engine.optimizer.param_groups for p in group["params"]}
        for name, parameter in self._parameters.items():
            self._note(TraceStage.MEMBERS, name, of_number(float(id(parameter) in held)))
        self._listen(model, engine, trainer.task)

    def on_before_optimizer_step(self, trainer: Trainer, step: int) -> None:  # noqa: ARG002
        """Record the gradients, which are normalized and clipped by now."""
        self._micro = None
        if trainer.assembly is None or not self._is_wanted:
            return
        norm = trainer.assembly.engine.meter.grad_norm
        if norm is not None:
            self._note(TraceStage.CLIPPING, "gradient norm", of_number(float(norm)))
        gradients = self._gradients()
        self._note_all(TraceStage.CLIPPING, gradients)
        self._before = _faint_elements(self._parameters, gradients)

    def on_train_batch_start(self, trainer: Trainer, step: int) -> None:  # noqa: ARG002

        self._step = step

    def on_train_batch_end(self, trainer: Trainer, step: int) -> None:  # noqa: ARG002
        """Record the optimizer's settings and the weight updates."""
        if trainer.assembly is None or not self._is_wanted:
            return
        for index, group in enumerate(trainer.assembly.engine.optimizer.param_groups):
            for name, value in _numbers(group):
                self._note(TraceStage.SETTINGS, f"{name} of group {index}", of_number(value))
        moves = {
            name: _move(before, _whole(self._parameters[name]), faint)
            for name, (before, faint) in self._before.items()
        }
        self._before = {}
        for name in self._by_execution(moves, backwards=False):
            self._note(TraceStage.UPDATE, name, moves[name])
        if self._file is not None:
            self._file.flush()

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:  # noqa: ARG002

        self.on_fit_end(trainer)

    def on_fit_end(self, trainer: Trainer) -> None:  # noqa: ARG002

        if self._file is not None:
            self._file.close()
            self._file = None

    @property
    def _is_wanted(self) -> bool:
        return self._step <= self._last_step

    def _listen(self, model: nn.Module, engine: Engine, task: Task) -> None:
        # in a pipeline, modules outside this rank's stages have no meaningful outputs
        spread = engine.spread
        own = spread.own_modules() if isinstance(spread, Pipelined) else set(model.modules())
        for name, module in model.named_modules():
            if name.rpartition(".")[2] not in _WRAPPERS and module in own:
                module.register_forward_pre_hook(self._beginning(own_name(name)))
                module.register_forward_hook(self._ending(own_name(name)))
        around(engine, "micro_batch", self._noting_turn)
        around(task, "loss", self._noting_loss)
        around(engine.spread, "finish_gradients", self._noting_gradients)

    def _noting_turn(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def micro_batch(micro: MicroBatch, **options: Any) -> Any:
            self._micro = micro
            self._calls.clear()
            return original(micro, **options)

        return micro_batch

    def _noting_loss(self, original: Callable[..., Loss]) -> Callable[..., Loss]:
        def loss(model: nn.Module, batch: Any) -> Loss:
            micro = self._micro
            if micro is None or not micro.num_samples or not self._is_wanted:
                return original(
                    model, batch
                )  # an evaluation, or an empty micro-batch that only keeps ranks in step
            for place, tensor in _tensors("batch", batch):
                self._note(TraceStage.DATA, place, fingerprint(tensor))
            self._in_loss = True  # a recomputation in backward is not a forward
            try:
                result = original(model, batch)
            except BaseException:  # all pipeline stages but the last leave the loss by an exception
                self._micro = None
                raise
            finally:
                self._in_loss = False
            value = result.sum if isinstance(result, Total) else result
            self._note(TraceStage.LOSS, "loss", fingerprint(_whole(value)))
            if isinstance(result, Total):
                self._note(TraceStage.LOSS, "count", of_number(float(result.count)))
            self._micro = None
            return result

        return loss

    def _noting_gradients(self, original: Callable[[], None]) -> Callable[[], None]:
        def finish_gradients() -> None:
            original()
            self._micro = None
            if self._is_wanted:
                self._note_all(TraceStage.BACKWARD, self._gradients(), backwards=True)

        return finish_gradients

    def _beginning(self, name: str) -> Callable[..., None]:
        def begin(module: nn.Module, inputs: Any) -> None:  # noqa: ARG001
            self._begun.setdefault(name, len(self._begun))

        return begin

    def _ending(self, name: str) -> Callable[..., None]:
        def end(module: nn.Module, inputs: Any, output: Any) -> None:  # noqa: ARG001
            if not self._in_loss:
                return
            self._calls[name] += 1
            call = self._calls[name]
            place = name if call == 1 else f"{name} (call {call})"
            for each, tensor in _tensors(place, output):
                self._note(TraceStage.FORWARD, each, fingerprint(tensor))

        return end

    def _gradients(self) -> dict[str, torch.Tensor]:
        return {n: p.grad for n, p in self._parameters.items() if p.grad is not None}

    def _note_all(
        self, stage: TraceStage, tensors: dict[str, Any], *, backwards: bool = False
    ) -> None:
        # in the same order on every rank, since gathering a DTensor is collective
        values = {name: fingerprint(_whole(tensor)) for name, tensor in tensors.items()}
        for name in self._by_execution(values, backwards=backwards):
            self._note(stage, name, values[name])

    def _by_execution(self, names: Iterable[str], *, backwards: bool) -> list[str]:
        return sorted(names, key=self._when_used, reverse=backwards)

    def _when_used(self, parameter: str) -> int:
        """When the parameter's module was first called; if never, its nearest called parent."""
        owner = parameter.rpartition(".")[0]
        while owner and owner not in self._begun:
            owner = owner.rpartition(".")[0]
        return self._begun.get(owner, -1)

    def _note(self, stage: TraceStage, place: str, value: Fingerprint) -> None:
        if self._file is None:
            return
        micro = NO_MICRO_BATCH if self._micro is None else self._micro.index
        self._file.write(json.dumps([self._step, stage, place, micro, *value]) + "\n")


def read_trace(path: Path) -> list[TraceEntry]:
    """The entries of a trace, in the order of execution."""
    lines = (json.loads(line) for line in path.read_text().splitlines())
    return [
        TraceEntry(Key(step, TraceStage(stage), place, micro), Fingerprint(*value))
        for step, stage, place, micro, *value in lines
    ]


def around(
    owner: object, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Wrap a method of this one object, even if it is frozen."""
    object.__setattr__(owner, name, make(getattr(owner, name)))


def own_name(name: str) -> str:
    """The user's name of a module or parameter, without parts added by wrappers."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS) or "model"


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor of a DTensor; all its ranks must call this."""
    return whole(tensor).detach()


def _faint_elements(
    parameters: dict[str, nn.Parameter], gradients: dict[str, torch.Tensor]
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Each parameter's weights, and a mask of elements whose gradient is mostly rounding, not 0."""
    sizes = {name: _whole(gradient).abs() for name, gradient in gradients.items()}
    num_elements = max(1, sum(gradient.numel() for gradient in sizes.values()))
    squares = sum(float(gradient.double().square().sum()) for gradient in sizes.values())
    usual = math.sqrt(squares / num_elements)
    return {
        name: (_whole(parameters[name]).clone(), (size > 0) & (size < _FAINT * usual))
        for name, size in sizes.items()
    }


def _move(before: torch.Tensor, after: torch.Tensor, faint: torch.Tensor) -> Fingerprint:
    """A step's update of a parameter; its possible rounding error is the slack."""
    moved = after.double() - before.double()
    last_bit = torch.finfo(after.dtype).eps * torch.linalg.vector_norm(after.double())
    slack = moved[faint].abs().sum() + last_bit
    return fingerprint(moved)._replace(slack=float(slack))


def _tensors(place: str, value: Any) -> list[tuple[str, torch.Tensor]]:
    from torch.utils._pytree import tree_leaves

    found = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    if len(found) == 1:
        return [(place, _whole(found[0]))]
    return [(f"{place}[{index}]", _whole(leaf)) for index, leaf in enumerate(found)]


def _numbers(group: dict[str, Any]) -> list[tuple[str, float]]:
    names = {"lr": "learning rate", "weight_decay": "weight decay"}
    return [
        (names.get(name, name), float(value))
        for name, value in group.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    ]

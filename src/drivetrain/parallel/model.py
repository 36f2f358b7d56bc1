"""ParallelModel: a model distributed over ranks, with one interface for all strategies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from drivetrain.core.stateful import Stateful
from drivetrain.parallel.clock import Waiting
from drivetrain.parallel.parts import whole

NOTHING: AbstractContextManager[None] = nullcontext()


Wanted = Callable[[str], bool]
"""Takes a tensor's name."""


def every_one(name: str) -> bool:  # noqa: ARG001 - a Wanted
    """Select all tensors."""
    return True


def own_name(name: str) -> str:
    """Remove the prefix that torch.compile(module) adds to the names of its tensors."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def tensors_by_names(model: nn.Module) -> list[tuple[list[str], torch.Tensor]]:
    """Return each saved tensor of a model with all its names: tied weights have several."""
    tied: dict[int, tuple[list[str], torch.Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor):
            tied.setdefault(id(tensor), ([], tensor))[0].append(name)
    return list(tied.values())


class EngineStep(Protocol):
    """An engine that holds the gradients internally: it scales, clips and steps in one call."""

    def take_over(self, optimizer: torch.optim.Optimizer) -> None:
        """Hand over the optimizer; from now on the engine calls it."""
        ...

    def backward(self, loss: torch.Tensor) -> None:
        """Add one micro-batch's gradients."""
        ...

    def step(self, correction: torch.Tensor | None) -> torch.Tensor:
        """Multiply the gradients, clip, and update the weights. Return the norm before clipping."""
        ...

    def model_state(self) -> dict[str, torch.Tensor]:
        """Return this rank's weights and buffers by the user's names. A collective call."""
        ...

    def optimizer_state(self, *, make: bool = False) -> dict[str, Any]:
        """Return this rank's state by `<parameter>.<key>`; `make` it if missing. Collective."""
        ...

    def put_back(self, model: Mapping[str, torch.Tensor], optimizer: Mapping[str, Any]) -> None:
        """Load what `model_state` and `optimizer_state` returned. A collective call."""
        ...


class LocalSteps(Protocol):
    """Ranks train alone for some steps, then synchronize the weights. Steps count from 0."""

    def is_alone(self, step: int) -> bool:
        """True if this step uses this rank's gradients only."""
        ...

    def sum_gradients(self) -> None:
        """Reduce gradients in a step that is not alone. A collective call."""
        ...

    def about_to_move(self, count: torch.Tensor) -> None:
        """Called before a step on this rank's gradients, with its number of samples or tokens."""
        ...

    def agrees_after(self, step: int) -> bool:
        """True if the ranks synchronize the weights after this step."""
        ...

    def agree(self) -> None:
        """Synchronize the weights of all ranks. A collective call."""
        ...

    def ends_at(self, total_steps: int | None) -> None:
        """Set the run's last step; None while it is not known."""
        ...


@dataclass(frozen=True)
class Choice:
    """A config key that was set automatically, its value, and the reason."""

    key: str
    value: Any
    why: str
    said: str
    """The line shown to the user."""


class ParallelModel:
    """What the training loop needs of a distributed model. Methods after `local` have defaults."""

    module: nn.Module
    """Called in training."""
    inner: nn.Module
    """The user's own module."""
    evaluated: Any
    """Called in evaluation: `inner`, unless it is split over several ranks."""
    counts: bool
    """Whether this rank's losses are summed: true on one of the ranks with the same samples."""
    forwards_in_lockstep: bool = False
    """Whether forward communicates, so that all ranks must run the same number of them."""
    can_replay: bool = False
    """Whether an extra backward may be run whose gradients are dropped."""
    reduces_in_backward: bool = False
    """Whether gradients stay whole on every rank unless a backward reduces them."""
    needs_every_turn: bool = False
    """Whether a rank without samples must still run the micro-batch, because others wait."""
    loss_multiplier: float = 1.0
    """Undoes the engine's own averaging: the loop uses sums over the global batch."""
    engine_step: EngineStep | None = None
    """The engine that holds the gradients; None if they are in `parameter.grad`."""
    local_steps: LocalSteps | None = None
    """Set if ranks step on their own gradients; None if all ranks share every step."""
    steps_apart: bool = False
    """Whether ranks may be at different steps, and so synchronize only where they must."""
    expects_all: bool = False
    """Whether every trained parameter must have a gradient in the first step."""
    syncs_stages: bool = False
    """Whether a pipeline must call `sync_stage`."""

    def micro_batch(self, index: int, *, is_last: bool) -> AbstractContextManager[None]:
        """Wrap forward and backward of one micro-batch; gradients are reduced only in the last."""
        raise NotImplementedError

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate the gradients of every weight the loss depends on."""
        loss.backward()

    def gradient_leaves(self) -> dict[str, torch.Tensor]:
        """Return, by name, the tensors that get this rank's gradients before any reduction."""
        return {n: p for n, p in self.inner.named_parameters() if p.requires_grad}

    def finish_gradients(self) -> None:
        """Called after the last micro-batch; on return the gradients are complete."""
        raise NotImplementedError

    def total_norm(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """Return the 2-norm over all ranks' gradients, as a plain tensor."""
        raise NotImplementedError

    def local(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the plain tensors this rank holds, for elementwise operations."""
        raise NotImplementedError

    def whole_tensors(self, wanted: Wanted = every_one) -> Iterator[tuple[str, Any]]:
        """Yield the model's state dict as whole tensors, under the user's names.

        Each iteration is a collective call, so every rank must exhaust it. A tensor may be the one
        in use and is valid only until the next; ranks other than 0 may get fewer. Tensors that are
        not `wanted` are not gathered.
        """
        with self.shown_weights():
            for name, value in self.inner.state_dict().items():
                own = own_name(name)
                if wanted(own):
                    yield own, whole(value)

    def full_state(self, wanted: Wanted = every_one, *, keep: bool = True) -> dict[str, Any]:
        """Return `whole_tensors` as CPU copies on the ranks that `keep` them. A collective call."""
        kept = {}
        for name, value in self.whole_tensors(wanted):
            if keep:
                is_tensor = isinstance(value, torch.Tensor)
                kept[name] = value.detach().to("cpu", copy=True) if is_tensor else value
        return kept

    def shown_weights(self) -> AbstractContextManager[bool]:
        """Wrap code that reads the model, so that every rank has the same weights meanwhile.

        Yields whether they are restored at the end: copies must be complete by then.
        """
        return nullcontext(False)

    def weights_change(self) -> None:
        """Call before weights change in place, other than by the optimizer after a backward."""

    def private_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Stateful]:  # noqa: ARG002
        """Return this rank's own state, by name, that must be restored on resume."""
        return {}

    def watch_waits(self, waiting: Waiting) -> None:
        """Report to `waiting` when this rank waits for others, where that can be observed."""

    def sync_stage(self, modules: Sequence[nn.Module], *, is_last: bool) -> None:
        """Called before a stage's backward: sets whether it reduces these modules' gradients."""

    def measured(self) -> dict[str, float]:
        """Return the strategy's own scalars since the last call, by name. A collective call."""
        return {}

    def choices(self) -> list[Choice]:
        """Return the config keys that were set automatically."""
        return []

    def notes(self) -> list[str]:
        """Return messages to show before the first step."""
        return []

    def when_settled(self, tell: Callable[[Choice], None]) -> None:
        """Call `tell` with each choice that is only made during the first steps."""


# The dtype a model computes in, by its config name; None: the dtype of its weights.

COMPUTE_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}

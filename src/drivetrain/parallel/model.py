"""ParallelModel: a model over the ranks, as the engine sees it, whatever the strategy."""

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
"""Of a tensor's name."""


def every_one(name: str) -> bool:  # noqa: ARG001 - a Wanted
    """All tensors."""
    return True


def own_name(name: str) -> str:
    """Without what torch.compile(module) puts before the names of a module's tensors."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def tensors_by_names(model: nn.Module) -> list[tuple[list[str], torch.Tensor]]:
    """Each tensor that is saved with a model, under all of its names: tied weights have several."""
    tied: dict[int, tuple[list[str], torch.Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor):
            tied.setdefault(id(tensor), ([], tensor))[0].append(name)
    return list(tied.values())


class EngineStep(Protocol):
    """An engine that keeps the gradients to itself: it corrects, clips and steps in one call."""

    def take_over(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer is made; from here on it is the engine that calls it."""
        ...

    def backward(self, loss: torch.Tensor) -> None:
        """Add one micro-batch's gradients."""
        ...

    def step(self, correction: torch.Tensor | None) -> torch.Tensor:
        """Multiply the gradients, clip, and move the weights. Returns the norm before clipping."""
        ...

    def model_state(self) -> dict[str, torch.Tensor]:
        """Weights and buffers by the user's names; this rank's part. A collective call."""
        ...

    def optimizer_state(self, *, make: bool = False) -> dict[str, Any]:
        """By `<parameter>.<key>`; this rank's part; `make` it if there is none. Collective."""
        ...

    def put_back(self, model: Mapping[str, torch.Tensor], optimizer: Mapping[str, Any]) -> None:
        """What those two gave, filled with other values. A collective call."""
        ...


class LocalSteps(Protocol):
    """Ranks that train alone for some steps and then agree on the weights. Steps count from 0."""

    def is_alone(self, step: int) -> bool:
        """Whether this step's gradients are this rank's own."""
        ...

    def sum_gradients(self) -> None:
        """For a step that is not alone. A collective call."""
        ...

    def about_to_move(self, count: torch.Tensor) -> None:
        """Before a step of its own, on so many samples or tokens."""
        ...

    def agrees_after(self, step: int) -> bool:
        """Whether the ranks agree on the weights after this step."""
        ...

    def agree(self) -> None:
        """The same weights on every rank. A collective call."""
        ...

    def ends_at(self, total_steps: int | None) -> None:
        """The run's last step; None while it is not known."""
        ...


@dataclass(frozen=True)
class Choice:
    """A key of the config that was left open, what it is now, and why."""

    key: str
    value: Any
    why: str
    said: str
    """The same as a line for the user."""


class ParallelModel:
    """A model over the ranks: what the loop needs of it. Below `local` all has a default."""

    module: nn.Module
    """Called in training."""
    inner: nn.Module
    """The user's own module."""
    evaluated: Any
    """Called in evaluation: `inner`, unless its parts are on several ranks."""
    counts: bool
    """Whether this rank's losses are summed: one of the ranks that work on the same samples."""
    forwards_in_lockstep: bool = False
    """Whether a forward talks to other ranks, so that all must make the same number of them."""
    can_replay: bool = False
    """Whether a backward may be made that does not count: its gradients are dropped."""
    reduces_in_backward: bool = False
    """Whether gradients are kept whole on every rank unless a backward reduces them."""
    needs_every_turn: bool = False
    """Whether a rank must run a micro-batch even when it has no samples, because others wait."""
    loss_multiplier: float = 1.0
    """Undoes the engine's own averaging: the loop speaks of sums over the global batch."""
    engine_step: EngineStep | None = None
    """The engine that has the gradients; None when they lie open in `parameter.grad`."""
    local_steps: LocalSteps | None = None
    """For ranks that step by gradients of their own; None where every step is one of all ranks."""
    steps_apart: bool = False
    """Whether ranks may be at different steps: then they meet only where they must."""
    expects_all: bool = False
    """Whether every trained parameter must have a gradient in the first step."""
    syncs_stages: bool = False
    """Whether a pipeline must call `sync_stage`."""

    def micro_batch(self, index: int, *, is_last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of one micro-batch; gradients travel only in the last."""
        raise NotImplementedError

    def backward(self, loss: torch.Tensor) -> None:
        """Add up gradients: of every weight the loss depends on."""
        loss.backward()

    def gradient_leaves(self) -> dict[str, torch.Tensor]:
        """By name, the tensors at which backward gives this rank's own gradients, not yet sent."""
        return {n: p for n, p in self.inner.named_parameters() if p.requires_grad}

    def finish_gradients(self) -> None:
        """After the last micro-batch: gradients are complete on return."""
        raise NotImplementedError

    def total_norm(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """The 2-norm over all ranks' gradients, as a plain tensor."""
        raise NotImplementedError

    def local(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """The plain tensors this rank holds, for what is done to every element alike."""
        raise NotImplementedError

    def whole_tensors(self, wanted: Wanted = every_one) -> Iterator[tuple[str, Any]]:
        """The model's state dict, tensor by tensor, each under the user's own name and whole.

        A collective call, step by step: every rank goes through all of it. A tensor may be the one
        in use, and is only good until the next; ranks other than 0 may get fewer. What is not
        `wanted` is not gathered.
        """
        with self.shown_weights():
            for name, value in self.inner.state_dict().items():
                own = own_name(name)
                if wanted(own):
                    yield own, whole(value)

    def full_state(self, wanted: Wanted = every_one, *, keep: bool = True) -> dict[str, Any]:
        """The same together, copied to the CPU of the ranks that `keep` it. A collective call."""
        kept = {}
        for name, value in self.whole_tensors(wanted):
            if keep:
                is_tensor = isinstance(value, torch.Tensor)
                kept[name] = value.detach().to("cpu", copy=True) if is_tensor else value
        return kept

    def shown_weights(self) -> AbstractContextManager[bool]:
        """Around whatever shows the model to somebody: the same weights on every rank.

        Gives whether they are taken back at its end: who copies them must be done by then.
        """
        return nullcontext(False)

    def weights_change(self) -> None:
        """Before weights are changed in place, other than by the optimizer after a backward."""

    def private_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Stateful]:  # noqa: ARG002
        """What this rank alone has and must find again when the run resumes; by name."""
        return {}

    def watch_waits(self, waiting: Waiting) -> None:
        """Tell `waiting` when this rank waits for others, where that can be seen."""

    def sync_stage(self, modules: Sequence[nn.Module], *, is_last: bool) -> None:
        """Before a pipeline stage's backward: whether it reduces these modules' gradients."""

    def measured(self) -> dict[str, float]:
        """Scalars of the strategy's own since the last call, by name. A collective call."""
        return {}

    def choices(self) -> list[Choice]:
        """What was left open in the config and is settled now."""
        return []

    def notes(self) -> list[str]:
        """What the user should read before the first step."""
        return []

    def when_settled(self, tell: Callable[[Choice], None]) -> None:
        """Call `tell` with each choice that only the run's first steps settle."""


# What a model computes in, by the config's word for it; None: in what its weights are.

COMPUTE_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}

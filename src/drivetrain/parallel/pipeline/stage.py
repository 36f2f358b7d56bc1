"""One stage: the model's own forward, run with the parts that this rank has.

Other ranks' parts are replaced by stand-ins that pass on the hidden state. The first block of the
stage gets the input from the previous stage; after its last block the forward is aborted, unless
this is the last stage. So any model whose blocks pass on one hidden state can be split unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from drivetrain.parallel.blocks import with_hidden

Compute = Callable[[Callable[..., Any], int, int], torch.Tensor]
"""`compute(model, index, stage)`: a micro-batch's weighted loss, by calling the model once."""


class Sync(Protocol):
    """`ParallelModel.sync_stage`."""

    def __call__(self, modules: Sequence[nn.Module], *, is_last: bool) -> None:
        """Set whether the next backward reduces these modules' gradients."""
        ...


@dataclass
class Carry:
    """Holds the current hidden state of this rank's part of the model."""

    hidden: torch.Tensor | None = None


class Absent(nn.Module):
    """A stand-in for a module that another rank has."""

    def __init__(self, carry: Carry) -> None:
        super().__init__()
        self._carry = carry

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG002
        """Return the current hidden state; the result computed from it is not used."""
        return self._carry.hidden


class _AsModel:
    """The model that the user's loss gets: a call runs the stage, attributes are the model's."""

    def __init__(self, stage: Stage, hidden: torch.Tensor) -> None:
        self._call = partial(stage.call, hidden)
        self._model = stage.model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class _Left(Exception):
    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.hidden = hidden


@dataclass
class Chunk:
    """The blocks of one stage, and the ModuleLists that contain them."""

    index: int
    containers: dict[nn.Module, dict[str, nn.Module | None]]
    """For each ModuleList, its children while this stage runs."""
    blocks: list[nn.Module]
    pieces: list[nn.Module] = field(default_factory=list)
    """Modules before or after the blocks that belong to this stage."""
    others: list[tuple[nn.Module, str]] = field(default_factory=list)
    """Parent and name of modules that this rank has for another of its stages."""


class Stage(nn.Module):
    """The module torch's pipeline runs: hidden state in, hidden state or loss out."""

    model: nn.Module
    _absent: Absent

    def __init__(self, model: nn.Module, chunk: Chunk, carry: Carry, num_stages: int) -> None:
        super().__init__()
        self._chunk = chunk
        self._carry = carry
        object.__setattr__(self, "_absent", Absent(carry))
        self._is_first, self._is_last = chunk.index == 0, chunk.index == num_stages - 1
        self._received: torch.Tensor | None = None
        self._calls = 0
        self.compute: Compute = _nothing_to_compute
        self.last_index = 0
        self.sync: Sync | None = None
        self.index = chunk.index
        object.__setattr__(self, "model", model)  # not a child: it has all of the rank's weights
        self.parts = nn.ModuleList([*chunk.pieces, *chunk.blocks])
        chunk.blocks[0].register_forward_pre_hook(self._inject, with_kwargs=True)
        for block in chunk.blocks:
            block.register_forward_hook(self._follow)

    def forward(self, hidden: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Run micro-batch number `index`."""
        number = int(index)
        self._calls = 0
        try:
            result = self.compute(_AsModel(self, hidden), number, self.index)
        except _Left as left:
            result = left.hidden
        if self.sync is not None:
            result.register_hook(partial(self._sync_if_last, number))
        return result

    def call(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Handle the call of the model in the user's loss."""
        self._calls += 1
        if self._calls > 1:
            raise RuntimeError("pp needs a loss that calls the model once")
        output = self.run(hidden, args, kwargs)
        if self._is_last:
            return output
        raise _Left(output)

    def run(self, hidden: torch.Tensor | None, args: Any, kwargs: Any) -> Any:
        """Run this stage's part of forward; return its hidden state, or the model's output."""
        self._received = None if self._is_first else hidden
        self._carry.hidden = self._received
        with self._only_own():
            output = self.model(*args, **kwargs)
        after, self._carry.hidden, self._received = self._carry.hidden, None, None
        return output if self._is_last else after

    @contextmanager
    def _only_own(self) -> Iterator[None]:
        """Reduce the model to this stage's modules inside the context."""
        whole = {container: vars(container)["_modules"] for container in self._chunk.containers}
        aside = [(parent, name, getattr(parent, name)) for parent, name in self._chunk.others]
        try:
            for container, own in self._chunk.containers.items():
                vars(container)["_modules"] = own
            for parent, name, _ in aside:
                setattr(parent, name, self._absent)
            yield
        finally:
            for parent, name, module in aside:
                setattr(parent, name, module)
            for container, modules in whole.items():
                vars(container)["_modules"] = modules

    def _inject(self, block: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:  # noqa: ARG002
        if self._received is None:
            return args, kwargs
        return with_hidden(args, kwargs, lambda _: self._received)

    def _follow(self, block: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG002
        self._carry.hidden = output[0] if isinstance(output, tuple) else output

    def _sync_if_last(self, index: int, gradient: torch.Tensor) -> None:  # noqa: ARG002
        """Tell `sync` whether this is the stage's last backward, which reduces gradients."""
        if self.sync is not None:
            root = [self.model] if self._chunk.pieces else []
            self.sync([*self._chunk.blocks, *root], is_last=index == self.last_index)


def _nothing_to_compute(model: Callable[..., Any], index: int, stage: int) -> torch.Tensor:
    raise AssertionError(f"stage {stage} was run outside of a step ({model}, {index})")

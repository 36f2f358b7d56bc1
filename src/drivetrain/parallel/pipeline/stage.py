"""One stage: the model's own forward, run with the parts that this rank has.

The parts it has not are stand-ins that hand on the hidden state. The first of its blocks is given
what the stage before has sent; after the last of them the forward is left, unless this is the last
stage. So any model whose blocks hand one hidden state on can be cut, without a line of its own.
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
        """Whether the next backward reduces these modules' gradients."""
        ...


@dataclass
class Carry:
    """The hidden state on its way through this rank's part of the model."""

    hidden: torch.Tensor | None = None


class Absent(nn.Module):
    """Stands in for a part that another rank has."""

    def __init__(self, carry: Carry) -> None:
        super().__init__()
        self._carry = carry

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG002
        """The hidden state as it is now; what is made of it is not used."""
        return self._carry.hidden


class _AsModel:
    """What the user's loss is given: called like the model, and otherwise the model."""

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
    """The blocks of one stage, and where they are kept."""

    index: int
    containers: dict[nn.Module, dict[str, nn.Module | None]]
    """Per ModuleList: what it holds while this stage runs."""
    blocks: list[nn.Module]
    pieces: list[nn.Module] = field(default_factory=list)
    """Parts before or after the blocks that this stage has."""
    others: list[tuple[nn.Module, str]] = field(default_factory=list)
    """Where parts are kept that this rank has for another of its stages: parent and name."""


class Stage(nn.Module):
    """What torch's pipeline calls: the hidden state in, the hidden state or the loss out."""

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
        object.__setattr__(self, "model", model)  # not a child: its weights are the rank's
        self.parts = nn.ModuleList([*chunk.pieces, *chunk.blocks])
        chunk.blocks[0].register_forward_pre_hook(self._inject, with_kwargs=True)
        for block in chunk.blocks:
            block.register_forward_hook(self._follow)

    def forward(self, hidden: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """One micro-batch; `index` says which."""
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
        """The model, as the user's loss calls it."""
        self._calls += 1
        if self._calls > 1:
            raise RuntimeError("pp needs a loss that calls the model once")
        output = self.run(hidden, args, kwargs)
        if self._is_last:
            return output
        raise _Left(output)

    def run(self, hidden: torch.Tensor | None, args: Any, kwargs: Any) -> Any:
        """This stage's part of the forward: the hidden state after it, or the model's output."""
        self._received = None if self._is_first else hidden
        self._carry.hidden = self._received
        with self._only_own():
            output = self.model(*args, **kwargs)
        after, self._carry.hidden, self._received = self._carry.hidden, None, None
        return output if self._is_last else after

    @contextmanager
    def _only_own(self) -> Iterator[None]:
        """The model's lists hold this stage's blocks alone; other stages' parts stand aside."""
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
        """Gradients travel in a stage's last backward only, or (some can be told so) in each."""
        if self.sync is not None:
            root = [self.model] if self._chunk.pieces else []
            self.sync([*self._chunk.blocks, *root], is_last=index == self.last_index)


def _nothing_to_compute(model: Callable[..., Any], index: int, stage: int) -> torch.Tensor:
    raise AssertionError(f"stage {stage} was run outside of a step ({model}, {index})")

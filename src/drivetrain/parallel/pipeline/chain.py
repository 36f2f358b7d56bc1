"""All stages one after the other, without a schedule: for evaluation, and to learn shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from drivetrain.parallel.pipeline.cut import Cut
from drivetrain.parallel.pipeline.stage import Stage


class Chain:
    """Called like the model; every rank gets its output. A collective call."""

    def __init__(
        self, model: nn.Module, stages: list[Stage], cut: Cut, group: dist.ProcessGroup
    ) -> None:
        self._model = model
        self._stages = {chunk.index: s for chunk, s in zip(cut.chunks, stages, strict=True)}
        self._owners = cut.owners
        self._group = group
        self._device = next(model.parameters()).device
        self._met: list[torch.Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Stage by stage, each where it is."""
        hidden: Any = None
        self._met = []
        for index, owner in enumerate(self._owners):
            stage = self._stages.get(index)
            made = stage.run(hidden, args, kwargs) if stage is not None else None
            is_last = index == len(self._owners) - 1
            hidden = self._output(made, owner) if is_last else self._hidden(made, owner)
        return hidden

    def shapes(self, probe: Callable[[Callable[..., Any]], Any]) -> list[torch.Tensor]:
        """What each stage hands on, as meta tensors; the last gives a loss."""
        was_training = self._model.training
        self._model.eval()  # or running statistics would count the probe
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                probe(self)
        finally:
            self._model.train(was_training)
        met, self._met = self._met, []
        return [*met, torch.empty((), device="meta")]

    def _hidden(self, made: torch.Tensor | None, owner: int) -> torch.Tensor:
        """The owner's hidden state, on every rank."""
        described: list[Any] = [None if made is None else (made.shape, made.dtype)]
        dist.broadcast_object_list(described, group_src=owner, group=self._group)
        shape, dtype = described[0]
        hidden = torch.empty(shape, dtype=dtype, device=self._device)
        if made is not None:
            hidden.copy_(made)
        dist.broadcast(hidden, group_src=owner, group=self._group)
        self._met.append(hidden.to("meta"))
        return hidden

    def _output(self, made: Any, owner: int) -> Any:
        """The owner's output, on every rank: its form as an object, its tensors as tensors.

        A tensor inside an object would arrive on the device of whoever sent it.
        """
        form = [tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), made)]
        dist.broadcast_object_list(form, group_src=owner, group=self._group)
        tensors = iter(tree_leaves(made))

        def receive(meta: torch.Tensor) -> torch.Tensor:
            tensor = torch.empty_like(meta, device=self._device)
            if made is not None:
                own = next(t for t in tensors if isinstance(t, torch.Tensor))
                tensor.copy_(own)
            dist.broadcast(tensor, group_src=owner, group=self._group)
            return tensor

        return tree_map_only(torch.Tensor, receive, form[0])

"""A model in stages, as the loop sees it: a step's micro-batches go through together."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from drivetrain.config.schema import Pipeline
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.parallel.pipeline import schedules
from drivetrain.parallel.pipeline.chain import Chain
from drivetrain.parallel.pipeline.cut import Cut
from drivetrain.parallel.pipeline.stage import Compute, Stage
from drivetrain.parallel.strategy import OwnStep, Spread
from drivetrain.parallel.whole import NOTHING

Probe = Callable[[Callable[..., Any]], Any]
"""`probe(model)` calls the model as the loss does, on a micro-batch like those to come."""


class Pipelined:
    """Stages over a model that has been cut and, within the stage, spread."""

    forwards_in_lockstep = True
    needs_every_turn = True
    own_step: OwnStep | None = None

    def __init__(
        self,
        under: Spread,
        cut: Cut,
        config: Pipeline,
        group: dist.ProcessGroup,
        copies: dist.ProcessGroup | None = None,
    ) -> None:
        self.module: nn.Module = under.module
        self.inner: nn.Module = under.inner
        self.loss_multiplier = under.loss_multiplier
        self.counts = under.counts and cut.chunks[-1].index == cut.num_stages - 1
        self._under = under
        self._cut = cut
        self._config = config
        self._group = group
        self._copies = copies
        self._stages = [
            Stage(under.module, chunk, cut.carry, cut.num_stages) for chunk in cut.chunks
        ]
        self.evaluated: Any = Chain(self.inner, self._stages, cut, group)
        self._schedules: dict[tuple[int, object], Any] = {}
        """By the number of micro-batches and their shape."""

    def run(self, num_micro_batches: int, shape: object, compute: Compute, probe: Probe) -> None:
        """Forward and backward of micro-batches of one shape. A collective call."""
        kind = (num_micro_batches, shape)
        if kind not in self._schedules:
            self._schedules[kind] = self._schedule(num_micro_batches, probe)
        for stage in self._stages:
            stage.compute, stage.last_index = compute, num_micro_batches - 1
        index = torch.arange(num_micro_batches)
        first = (index,) if self._cut.chunks[0].index == 0 else ()
        self._schedules[kind].step(*first, target=index, index=index, return_outputs=False)

    def same_for_all(self, shapes: list[Any]) -> list[tuple[int, ...]]:
        """Each micro-batch's shape on every copy: passes must begin and end together on all.

        Copies gather weights from each other in forward and backward, in one order.
        """
        own = torch.tensor([crc32(repr(shape).encode()) for shape in shapes])
        if self._copies is None:
            return [(value,) for value in own.tolist()]
        everyones = [torch.empty_like(own) for _ in range(dist.get_world_size(self._copies))]
        dist.all_gather(everyones, own, group=self._copies)
        return list(zip(*(shapes.tolist() for shapes in everyones), strict=True))

    def own_modules(self) -> set[nn.Module]:
        """The parts of the model that this rank has."""
        return {module for stage in self._stages for module in stage.parts.modules()}

    def _schedule(self, count: int, probe: Probe) -> Any:
        shapes = self.evaluated.shapes(probe)
        ranks = dist.get_world_size(self._group)
        name: str = self._config.schedule
        if not schedules.fits(name, count, ranks, self._cut.num_stages):
            name = schedules.SCHEDULES[name].falls_back_to
        if not name:
            rule = f"cannot take {count} micro-batches of one shape"
            remedy = "let all micro-batches have one shape (pad; drop a short last batch)"
            key = "parallel.pipeline.schedule"
            raise ConfigError([Problem(key, rule, remedy, self._config.schedule)])
        device = next(self.inner.parameters()).device
        stages = []
        for chunk, stage in zip(self._cut.chunks, self._stages, strict=True):
            made = PipelineStage(
                stage,
                chunk.index,
                self._cut.num_stages,
                device,
                input_args=_like(shapes[chunk.index - 1], device)
                if chunk.index
                else torch.zeros(1, dtype=torch.int64),
                output_args=_like(shapes[chunk.index], device),
                group=self._group,
            )
            stages.append(made)
        return schedules.SCHEDULES[name].make(stages, count)

    def micro_batch(self, index: int, *, is_last: bool) -> AbstractContextManager[None]:  # noqa: ARG002
        """Micro-batches are not taken one by one: see `run`."""
        return NOTHING

    def finish_gradients(self) -> None:
        """They are complete when the schedule is through."""

    def total_norm(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """Over all stages."""
        squared = self._under.total_norm(gradients) ** 2
        dist.all_reduce(squared, group=self._group)
        return squared.sqrt()

    def local(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """What this rank holds of its stages' gradients."""
        return self._under.local(gradients)

    def full_state(self) -> dict[str, Any]:
        """All stages' parts, on rank 0."""
        own = self._under.full_state()
        parts: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(parts, own, group=self._group)
        return {name: tensor for part in parts for name, tensor in part.items()}


def _like(meta: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of that shape that gradients flow through."""
    return torch.empty(meta.shape, dtype=meta.dtype, device=device, requires_grad=True)

"""A model in stages, as the loop sees it: a step's micro-batches go through together."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from drivetrain.config.schema import Pipeline
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.parallel.model import NOTHING, ParallelModel
from drivetrain.parallel.pipeline import schedules
from drivetrain.parallel.pipeline.chain import Chain
from drivetrain.parallel.pipeline.cut import Cut
from drivetrain.parallel.pipeline.recent import MOST, KnownShapes, Recent
from drivetrain.parallel.pipeline.stage import Compute, Stage
from drivetrain.parallel.waiting import Waiting

Probe = Callable[[Callable[..., Any]], Any]
"""`probe(model)` calls the model as the loss does, on a micro-batch like those to come."""


_Handed = tuple[torch.Size, torch.dtype]
"""What a stage hands on."""


@dataclass(frozen=True)
class _Scheduled:
    """A schedule, and torch's stages with their buffers."""

    schedule: Any
    stages: list[PipelineStage]

    def release(self) -> None:
        """Give the buffers back at once, also where torch's parts refer to each other."""
        for stage in self.stages:
            stage.clear_runtime_states()
            stage.args_recv_info.clear()
            stage.grad_recv_info.clear()


class Pipelined(ParallelModel):
    """Stages over a model that has been cut and, within the stage, spread."""

    forwards_in_lockstep = True
    needs_every_turn = True

    def __init__(
        self,
        under: ParallelModel,
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
        for stage in self._stages:
            stage.sync = under.sync_stage if under.syncs_stages else None
        self.evaluated: Any = Chain(self.inner, self._stages, cut, group)
        self._shapes = KnownShapes[list[_Handed]](speaks=dist.get_rank() == 0)
        self._schedules = Recent[_Scheduled](MOST, _Scheduled.release)
        """By the number of micro-batches and their shape."""

    def run(self, num_micro_batches: int, shape: Hashable, compute: Compute, probe: Probe) -> None:
        """Forward and backward of micro-batches of one shape. A collective call."""
        shapes = self._shapes.get(shape, partial(self._handed_on, probe))
        scheduled = self._schedules.get(
            (num_micro_batches, shape), partial(self._schedule, num_micro_batches, shapes)
        )
        for stage in self._stages:
            stage.compute, stage.last_index = compute, num_micro_batches - 1
        index = torch.arange(num_micro_batches)
        first = (index,) if self._cut.chunks[0].index == 0 else ()
        scheduled.schedule.step(*first, target=index, index=index, return_outputs=False)

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

    def _handed_on(self, probe: Probe) -> list[_Handed]:
        return [(tensor.shape, tensor.dtype) for tensor in self.evaluated.shapes(probe)]

    def _schedule(self, count: int, shapes: list[_Handed]) -> _Scheduled:
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
        return _Scheduled(schedules.SCHEDULES[name].make(stages, count), stages)

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
        # on the CPU: an object would arrive on the device of whoever sent it
        dist.all_gather_object(parts, own, group=self._group)
        return {name: tensor for part in parts for name, tensor in part.items()}

    def watch_waits(self, waiting: Waiting) -> None:
        """Those inside a stage; waiting for other stages is not seen."""
        self._under.watch_waits(waiting)


def _like(handed: _Handed, device: torch.device) -> torch.Tensor:
    """A tensor of that shape that gradients flow through."""
    shape, dtype = handed
    return torch.empty(shape, dtype=dtype, device=device, requires_grad=True)

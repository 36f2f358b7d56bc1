"""The ParallelModel of a pipeline, which runs a step's micro-batches together."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar
from zlib import crc32

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.utils._pytree import tree_leaves, tree_map_only

from drivetrain.config.schema import Pipeline
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.parallel.clock import Waiting
from drivetrain.parallel.model import NOTHING, ParallelModel, Wanted, every_one
from drivetrain.parallel.parts import on_host
from drivetrain.parallel.pipeline import schedules
from drivetrain.parallel.pipeline.cut import Cut
from drivetrain.parallel.pipeline.stage import Compute, Stage

# All stages one after the other, without a schedule: for evaluation, and to find shapes.


class Chain:
    """Called like the model; every rank gets the output. A collective call."""

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
        """Run stage by stage, each on its rank."""
        hidden: Any = None
        self._met = []
        for index, owner in enumerate(self._owners):
            stage = self._stages.get(index)
            made = stage.run(hidden, args, kwargs) if stage is not None else None
            is_last = index == len(self._owners) - 1
            hidden = self._output(made, owner) if is_last else self._hidden(made, owner)
        return hidden

    def shapes(self, probe: Callable[[Callable[..., Any]], Any]) -> list[torch.Tensor]:
        """Return each stage's output as a meta tensor; the last one's is a scalar loss."""
        was_training = self._model.training
        self._model.eval()  # so that running statistics do not change
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                probe(self)
        finally:
            self._model.train(was_training)
        met, self._met = self._met, []
        return [*met, torch.empty((), device="meta")]

    def _hidden(self, made: torch.Tensor | None, owner: int) -> torch.Tensor:
        """Broadcast the owner's hidden state to every rank."""
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
        """Broadcast the owner's output: its structure as an object, its tensors as tensors.

        A tensor inside an object would arrive on the sender's device.
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


# A cache of schedules. Each has buffers for every micro-batch, so only a few are kept.

MOST = 4
_SHAPES_BEFORE_A_WORD = 4 * MOST
_SHAPES_KNOWN = 1024

Value = TypeVar("Value")


class Recent(Generic[Value]):
    """An LRU cache. Ranks that make the same calls evict the same values."""

    def __init__(self, most: int, release: Callable[[Value], None] = lambda _: None) -> None:
        self._most = most
        self._release = release
        self._values: OrderedDict[Hashable, Value] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """Return the cached value of the key, or make it."""
        if key not in self._values:
            while len(self._values) >= self._most:  # before a new one takes memory
                self._release(self._values.popitem(last=False)[1])
            self._values[key] = make()
        self._values.move_to_end(key)
        return self._values[key]


class KnownShapes(Recent[Value]):
    """Caches the shapes between stages per micro-batch shape; warns once if they keep changing."""

    def __init__(self, *, speaks: bool) -> None:
        super().__init__(_SHAPES_KNOWN)
        self._speaks = speaks
        self._met = 0

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """Return the cached value, or find it by running a micro-batch through all stages."""
        return super().get(key, lambda: self._find_out(make))

    def _find_out(self, make: Callable[[], Value]) -> Value:
        self._met += 1
        if self._speaks and self._met == _SHAPES_BEFORE_A_WORD:
            warnings.warn(
                f"micro-batches keep changing shape ({self._met} so far): for each new one the "
                "pipeline runs a forward pass to learn the shapes between stages, and allocates "
                "new buffers; pad samples to a few lengths",
                stacklevel=2,
            )
        return make()


Probe = Callable[[Callable[..., Any]], Any]
"""`probe(model)` calls the model as the loss does, on a micro-batch of the same shape."""


_Handed = tuple[torch.Size, torch.dtype]
"""Shape and dtype of what a stage passes to the next one."""


@dataclass(frozen=True)
class _Scheduled:
    """A schedule and torch's stages with their buffers."""

    schedule: Any
    stages: list[PipelineStage]

    def release(self) -> None:
        """Free the buffers immediately, despite reference cycles in torch's objects."""
        for stage in self.stages:
            stage.clear_runtime_states()
            stage.args_recv_info.clear()
            stage.grad_recv_info.clear()


class Pipelined(ParallelModel):
    """A pipeline over a model that was split into stages, each replicated or sharded."""

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
        """Keyed by the number of micro-batches and their shape."""

    def run(self, num_micro_batches: int, shape: Hashable, compute: Compute, probe: Probe) -> None:
        """Run forward and backward of micro-batches of one shape. A collective call."""
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
        """Return each micro-batch's shape on every copy: passes must be aligned on all of them.

        Copies gather weights from each other in forward and backward, in one order.
        """
        own = torch.tensor([crc32(repr(shape).encode()) for shape in shapes])
        if self._copies is None:
            return [(value,) for value in own.tolist()]
        everyones = [torch.empty_like(own) for _ in range(dist.get_world_size(self._copies))]
        dist.all_gather(everyones, own, group=self._copies)
        return list(zip(*(shapes.tolist() for shapes in everyones), strict=True))

    def own_modules(self) -> set[nn.Module]:
        """Return the modules that this rank has."""
        return {module for stage in self._stages for module in stage.parts.modules()}

    def _handed_on(self, probe: Probe) -> list[_Handed]:
        return [(tensor.shape, tensor.dtype) for tensor in self.evaluated.shapes(probe)]

    def _schedule(self, count: int, shapes: list[_Handed]) -> _Scheduled:
        ranks = dist.get_world_size(self._group)
        name: str = self._config.schedule
        if not schedules.fits(name, count, ranks, self._cut.num_stages):
            name = schedules.SCHEDULES[name].falls_back_to
        if not name:
            rule = f"cannot run {count} micro-batches of one shape"
            remedy = "give all micro-batches one shape (pad; drop a short last batch)"
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
        """Do nothing: gradients are complete when the schedule has run."""

    def total_norm(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """Return the norm over all stages."""
        squared = self._under.total_norm(gradients) ** 2
        dist.all_reduce(squared, group=self._group)
        return squared.sqrt()

    def local(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return this rank's part of its stages' gradients."""
        return self._under.local(gradients)

    def whole_tensors(self, wanted: Wanted = every_one) -> Iterator[tuple[str, Any]]:
        """Yield all stages' tensors on rank 0, and a rank's own on the others."""
        ranks = dist.get_process_group_ranks(self._group)
        sends = ranks[0] == 0 != dist.get_rank()
        seen = set()
        for name, value in self._under.whole_tensors(wanted):
            seen.add(name)
            if sends:  # on the CPU: an object would arrive on the sender's device
                dist.send_object_list([name, on_host(value)], 0, self._group)
            yield name, value
        if sends:
            dist.send_object_list(["", None], 0, self._group)
        for source in ranks[1:] if dist.get_rank() == 0 else ():
            while (got := _receive(source, self._group))[0]:
                if got[0] not in seen:  # several stages may have the same buffer
                    seen.add(got[0])
                    yield got

    def weights_change(self) -> None:
        """Prepare the stages' weights for a change."""
        self._under.weights_change()

    def watch_waits(self, waiting: Waiting) -> None:
        """Report waits inside a stage; waiting for other stages is not measured."""
        self._under.watch_waits(waiting)


def _receive(source: int, group: dist.ProcessGroup) -> tuple[str, Any]:
    got: list[Any] = [None, None]
    dist.recv_object_list(got, source, group)
    return got[0], got[1]


def _like(handed: _Handed, device: torch.device) -> torch.Tensor:
    """Return a tensor of that shape that requires gradients."""
    shape, dtype = handed
    return torch.empty(shape, dtype=dtype, device=device, requires_grad=True)

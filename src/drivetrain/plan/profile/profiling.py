"""Profile a subject: a few traces on fake tensors, and how each quantity grows with size.

The model is created on the meta device and shortened to one block of each kind. Tensor parallelism,
recomputation and the like are applied by the same code as in a run. A 70-billion-parameter model
takes seconds and megabytes.
"""

from __future__ import annotations

import copy
import gc
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from drivetrain.config.schema import Tensor
from drivetrain.core.errors import ConfigError, EnvironmentProblem, Problem
from drivetrain.parallel.blocks import recompute_blocks, repeated_blocks
from drivetrain.parallel.expert.dispatch import spread_experts
from drivetrain.parallel.expert.finding import find_experts, spread_problems
from drivetrain.parallel.micro_batch import per_micro_batch
from drivetrain.parallel.model import COMPUTE_DTYPES
from drivetrain.plan.profile.fake_tensor_patches import fake_tensor_patches
from drivetrain.plan.profile.model import ModelProfile, Shape, Size, Way, shape_of, shorten
from drivetrain.plan.profile.samples import Sample, profile_from
from drivetrain.plan.profile.subject import Subject
from drivetrain.plan.profile.trace import TracedBytes, following_parts

# two batch sizes give the slope; 2 is the smallest that no layer treats as a special case
_BATCHES = (2, 4)
_SHARED_BY = (2, 4)
TRACED_EP = 2
"""Ranks that share the experts in a trace; the number hardly affects a rank's tokens."""


class Profiler:
    """Profiles of one subject, each traced at first use."""

    def __init__(self, subject: Subject, *, lengths: Sequence[float] = (1.0,)) -> None:
        self.subject = subject
        self._lengths = tuple(lengths) if subject.varies_length else (1.0,)
        with torch.device("meta"), _quietly():
            model = subject.model()
        self.shape = shape_of(model)
        self.tp_sizes = _tp_sizes(model)
        self.ep_sizes = _ep_sizes(model)
        self.num_parameters = sum(p.numel() for p in model.parameters())
        self.per_micro_batch = per_micro_batch(model)
        shorten(model, self.shape)
        self._template = model
        self._profiles: dict[Way, ModelProfile] = {}
        self.seconds = 0.0
        """Seconds spent on traces so far."""

    def profile(self, way: Way) -> ModelProfile:
        """Return the profile for one way of computing."""
        if way not in self._profiles:
            began = time.perf_counter()
            ranks = self._ranks(way)
            with _fake_ranks(max(ranks) * _ep(way)), _quick_collections():
                samples = {
                    Size(batch, length, tp): self._sample(way, batch, length, tp)
                    for tp in ranks
                    for length in self._lengths
                    for batch in _BATCHES
                }
            found = profile_from(way, self.shape, samples)
            self.seconds += time.perf_counter() - began
            if way.spreads_experts:
                found = _with_whole_weights(
                    found, self.profile(replace(way, spreads_experts=False))
                )
            self._profiles[way] = found
        return self._profiles[way]

    def _ranks(self, way: Way) -> tuple[int, ...]:
        """Return the numbers of tp ranks to trace with."""
        if not way.is_shared:
            return (1,)
        able = tuple(size for size in _SHARED_BY if size in self.tp_sizes)
        if not able:
            rule = f"{self.subject.name} cannot be sharded over 2 ranks"
            raise ConfigError([Problem("parallel.tp", rule, "use 1", has_value=False)])
        return able

    def _sample(self, way: Way, batch: int, length: float, tp: int) -> Sample:
        model = copy.deepcopy(self._template)
        if tp * _ep(way) > 1:
            self._share(model, tp, way)
        if way.recompute != "none":
            recompute_blocks(model, way.recompute)
        with _quietly(), fake_tensor_patches(), FakeTensorMode(allow_non_fake_inputs=True) as fake:
            _make_fake(model, COMPUTE_DTYPES[way.precision] if way.weights_cast else None)
            inputs = tree_map_only(
                torch.Tensor, fake.from_tensor, self.subject.batch(batch, length)
            )
            return trace_step(self.subject, model, inputs, way, self.shape)

    def _share(self, model: nn.Module, tp: int, way: Way) -> None:
        """Shard layers over `tp` ranks, and experts over the other axis of the mesh."""
        from torch.distributed.device_mesh import DeviceMesh

        ranks = torch.arange(tp * _ep(way)).view(_ep(way), tp)
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("ep", "tp"))
        experts = find_experts(model)
        if tp > 1:
            from drivetrain.parallel.tensor import share_layers

            share_layers(model, Tensor(sequence_parallel=way.sequence_parallel), mesh["tp"])
        if way.spreads_experts:
            spread_experts(experts, mesh["ep"], self.subject.expert_imbalance)


def _ep(way: Way) -> int:
    return TRACED_EP if way.spreads_experts else 1


def _with_whole_weights(traced: ModelProfile, whole: ModelProfile) -> ModelProfile:
    """Replace weights by their full sizes: strategies compute what ep leaves of them."""
    parts = tuple(
        replace(part, sizes=other.sizes)
        for part, other in zip(traced.parts, whole.parts, strict=True)
    )
    return replace(traced, parts=parts, optimizer_extra=whole.optimizer_extra)


def trace_step(subject: Subject, model: nn.Module, inputs: Any, way: Way, shape: Shape) -> Sample:
    model.train()
    blocks = repeated_blocks(model)
    leaves = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    seen = TracedBytes([*model.parameters(), *model.buffers(), *leaves], len(blocks) + 2)
    dtype = COMPUTE_DTYPES[way.precision]
    autocast = nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)
    trace = seen.trace
    trained = [p for p in model.parameters() if p.requires_grad]
    with _same_every_time(), following_parts(model, blocks, seen), seen:
        with autocast:
            loss = subject.loss(model, inputs)
        loss = loss[0] if isinstance(loss, tuple) else loss  # a loss with its parts
        total = loss if isinstance(loss, torch.Tensor) else loss.sum
        del loss
        if not blocks:
            seen.begin(trace.forward[-1])
        seen.begin(trace.backward[-1])
        total.backward()
        del total
        seen.begin(trace.optimizer)  # some optimizers create their state in the constructor
        optimizer = subject.optimizer(model)
        optimizer.step()
        first = len(trace.optimizer.live)
        optimizer.step()  # the first step has created the state; only the second is counted
        del trace.optimizer.live[: first - 1]
    trace.optimizer.moved_bytes /= 2  # for one step
    trace.optimizer.num_operations //= 2
    state = {id(p): _state_bytes(optimizer, p) for p in trained}
    scale = 2.0 if way.weights_cast and dtype is not None else 1.0  # at rest, weights are fp32
    return Sample.of(trace, model, blocks, shape, state, sum(map(_bytes, leaves)), scale)


def _state_bytes(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> int:
    tensors = [v for v in optimizer.state[parameter].values() if isinstance(v, torch.Tensor)]
    return sum(_bytes(getattr(tensor, "_local_tensor", tensor)) for tensor in tensors)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _make_fake(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Replace every weight and buffer in place by a fake CPU tensor; tied weights stay tied."""
    made: dict[int, Any] = {}

    def fake(tensor: torch.Tensor) -> Any:
        if id(tensor) not in made:
            cast = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            empty = torch.empty_like(tensor, device="cpu", dtype=cast)
            is_weight = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = (
                nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_weight else empty
            )
        return made[id(tensor)]

    for module in model.modules():
        for name, parameter in list(module._parameters.items()):  # noqa: SLF001 - as nn.Module does
            if parameter is not None:
                module._parameters[name] = fake(parameter)  # noqa: SLF001
        for name, buffer in list(module._buffers.items()):  # noqa: SLF001
            if buffer is not None:
                module._buffers[name] = fake(buffer)  # noqa: SLF001


def _tp_sizes(model: nn.Module) -> tuple[int, ...]:
    """Return the numbers of ranks that layers can be sharded over."""
    from drivetrain.parallel.tensor import plan_for

    sizes = [1]
    for size in (2, 4, 8, 16):
        try:
            plan_for(model, "model", size)
        except ConfigError:
            continue
        sizes.append(size)
    return tuple(sizes)


def _ep_sizes(model: nn.Module) -> tuple[int, ...]:
    """Return the numbers of ranks that can share every layer's experts; (1,) without experts."""
    experts = find_experts(model)
    most = max((each.count for each in experts), default=1)
    sizes = (2**power for power in range(1, most.bit_length()))
    return (1, *(size for size in sizes if not spread_problems(model, experts, size)))


@contextmanager
def _fake_ranks(number: int) -> Iterator[None]:
    """Simulate a world of `number` ranks, of which only this process exists."""
    if number == 1:
        yield
        return
    if dist.is_initialized():
        rule = "this process has already joined a run"
        raise EnvironmentProblem([Problem("plan", rule, "plan before that", has_value=False)])
    from torch.testing._internal.distributed.fake_pg import FakeStore

    _forget_meshes()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=number)
    try:
        yield
    finally:
        dist.destroy_process_group()
        _forget_meshes()


def _forget_meshes() -> None:
    """Clear torch's cache of sharding decisions, which refers to groups of the previous world."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()


@contextmanager
def _quick_collections() -> Iterator[None]:
    """Exclude existing objects from garbage collection, because none of them refers to a trace."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def _same_every_time() -> Iterator[None]:
    """Disable the garbage collector, which would free reference cycles at varying moments."""
    gc.collect()
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def _quietly() -> Iterator[None]:
    """Suppress warnings, which are about real runs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield

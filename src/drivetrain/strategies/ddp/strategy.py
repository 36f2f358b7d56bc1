"""ddp: a full copy of the model per rank; gradients are averaged while backward runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from drivetrain.cluster.description import Cluster
from drivetrain.config.schema import Communication, RunConfig
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.core.stateful import Stateful
from drivetrain.parallel.clock import Waiting
from drivetrain.parallel.layout import Layout
from drivetrain.parallel.model import NOTHING, Choice, ParallelModel
from drivetrain.parallel.several_models import backward_to
from drivetrain.parallel.world import World
from drivetrain.strategies.cost import Use
from drivetrain.strategies.ddp import DDP
from drivetrain.strategies.ddp.communication import Installed, Trial, install_compression
from drivetrain.strategies.ddp.compression import sent_bytes
from drivetrain.strategies.ddp.cost import COST
from drivetrain.strategies.single import SingleModel, SingleOfSeveral
from drivetrain.strategies.strategy import Cost, Profile, Strategy, cost_now, memory_problems


def make(config: RunConfig, micro_batch_blocks: list[range]) -> Strategy:
    """Return the ddp strategy, or its bitwise variant with `reproducibility=bitwise`."""
    settings = config.parallel.details(DDP)
    if config.reproducibility == "bitwise":
        from drivetrain.strategies.bitwise import BitwiseStrategy

        return BitwiseStrategy(settings, micro_batch_blocks)
    return DDPStrategy(settings, config.communication)


class DDPStrategy(Strategy):
    """Data parallelism with torch's DistributedDataParallel."""

    def __init__(self, config: DDP, communication: Communication | None = None) -> None:
        self._config = config
        self._communication = communication or Communication()

    def problems(self, profile: Profile, layout: Layout, cluster: Cluster) -> list[Problem]:
        """Check that a full copy fits on a device."""
        remedy = "use parallel.strategy=fsdp, which shards them"
        if layout.dp > 1 and layout.dp < layout.world_size:
            return [
                Problem(
                    "parallel.strategy",
                    f"ddp cannot replicate a model that is itself sharded over ranks ({layout})",
                    "use fsdp",
                    "ddp",
                )
            ]
        return memory_problems(self.cost(profile, layout, cluster), cluster, remedy)

    def cost(self, profile: Profile, layout: Layout, cluster: Cluster) -> Cost:
        """Return the cost of a full copy; bytes sent include compression."""
        whole = cost_now(COST, profile, Use(layout, self._config, profile.micro_batches_per_step))
        sent = sent_bytes(self._communication, profile.gradient_bytes, layout.dp)
        return replace(whole, sent_bytes_per_step=sent)

    def apply(self, model: nn.Module, world: World) -> ParallelModel:
        """Wrap the model; a single rank needs no wrapper."""
        model.to(world.device)
        if world.layout.dp == 1:
            return SingleModel(model, counts=world.speaks_for_samples)
        wrapped = self._wrap(model)
        # after the zero backward in _wrap, so that it leaves nothing in a compressor's state
        installed = install_compression(self._communication, wrapped, world.device)
        spread = DDPModel(wrapped, world.layout.dp, installed)
        spread.expects_all = not self._config.find_unused_parameters
        return spread

    def apply_beside_others(self, model: nn.Module, world: World) -> ParallelModel:
        """Like `apply`; gradients are reduced in the backward of this model's own losses."""
        asked = {
            "communication.compression": (self._communication.compression, "none"),
            "parallel.ddp.static_graph": (self._config.static_graph, False),
        }
        rule = "not supported with several models"
        problems = [
            Problem(key, rule, f"use {usual}", value)
            for key, (value, usual) in asked.items()
            if value != usual
        ]
        if problems:
            raise ConfigError(problems)
        model.to(world.device)
        if world.layout.dp == 1:
            return SingleOfSeveral(model, counts=world.speaks_for_samples)
        spread = DDPOfSeveral(self._wrap(model), world.layout.dp, Installed())
        spread.expects_all = not self._config.find_unused_parameters
        return spread

    def _wrap(self, model: nn.Module) -> DistributedDataParallel:
        kind = _StaticGraph if self._config.static_graph else DistributedDataParallel
        wrapped = kind(
            model,
            bucket_cap_mb=self._config.bucket_cap_mb,
            find_unused_parameters=self._config.find_unused_parameters,
            gradient_as_bucket_view=self._config.gradient_as_bucket_view,
            static_graph=self._config.static_graph,
        )
        if isinstance(wrapped, _StaticGraph):
            wrapped.refuse_hidden()
        # a static graph is recorded in the first backward, which must be a real one
        if not self._config.find_unused_parameters and not self._config.static_graph:
            _settle_buckets(wrapped)
        return wrapped


def _settle_buckets(wrapped: DistributedDataParallel) -> None:
    """Make DDP order its buckets now, in the same way at every start.

    DDP reorders them after its first backward, by the order in which gradients arrived. With three
    or more ranks, a gradient's position in a bucket determines the order in which it is added up,
    so the first step after a resume would differ in its last bits from the same step of an
    uninterrupted run. To prevent this, a backward of zeros runs first, in parameter order.
    """
    parameters = [p for p in wrapped.module.parameters() if p.requires_grad]
    zero = sum((p * 0).sum() for p in parameters)
    wrapped.reducer.prepare_for_forward()
    wrapped.reducer.prepare_for_backward([])
    if isinstance(zero, torch.Tensor):
        zero.backward()
    for parameter in parameters:
        parameter.grad = None


class _StaticGraph(DistributedDataParallel):
    """DDP's wrapper for static graphs, which must see every computation in its forward."""

    def __getattr__(self, name: str) -> Any:
        """Return attributes of the model; its methods and submodules are refused."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":  # not set yet
                raise
        value = getattr(self.module, name)
        if callable(value):
            raise _hidden(f"model.{name} would run outside the static graph that DDP recorded")
        return value

    def refuse_hidden(self) -> None:
        """Refuse a model with an attribute that DDP also has, because DDP's would hide it."""
        both = vars(self).keys() & vars(self.module).keys() - vars(nn.Module()).keys()
        if both:
            raise _hidden(f"DDP itself has an attribute called {sorted(both)[0]}")


def _hidden(rule: str) -> ConfigError:
    remedy = "set it to false, or call only model(batch) and rename such attributes"
    return ConfigError([Problem("parallel.ddp.static_graph", rule, remedy, True)])


class DDPModel(SingleModel):
    """A copy of the model per rank; each rank has the averaged gradients in full.

    The user's own module is called, not DDP's wrapper, so that a loss may use any of its attributes
    and methods. The wrapper prepares its reducer for gradients only when the wrapper is called, and
    gradients of anything computed without it are never averaged. Here the reducer is prepared when
    backward starts, whatever was called before.
    """

    needs_every_turn = True

    def __init__(
        self, wrapped: DistributedDataParallel, num_ranks: int, installed: Installed
    ) -> None:
        super().__init__(wrapped.module)
        self.communication = installed
        self.loss_multiplier = float(num_ranks)  # DDP divides by the number of ranks
        self._wrapped = wrapped
        self._is_last = True
        self.can_replay = not wrapped.static_graph
        if wrapped.static_graph:  # the graph is recorded in the wrapper's own forward
            self.module = wrapped

    def micro_batch(self, index: int, *, is_last: bool) -> AbstractContextManager[None]:
        """Do what DDP's forward does before a step's first. Only the last synchronizes."""
        wrapped, is_first, self._is_last = self._wrapped, self._is_last, is_last
        if wrapped.static_graph:  # recorded in a backward that synchronizes: all of them do
            return NOTHING
        if is_first:
            wrapped.reducer._rebuild_buckets()  # noqa: SLF001 - once, in the run's first step
            if wrapped.will_sync_module_buffers():
                wrapped._sync_buffers()  # noqa: SLF001 - running statistics come from rank 0
        around: AbstractContextManager[None] = wrapped._inside_ddp_forward()  # noqa: SLF001 - for the compiler
        return around

    def backward(self, loss: torch.Tensor) -> None:
        """Run backward; gradients are reduced in that of the last micro-batch."""
        if self._is_last:
            self._expect_gradients(loss)
        loss.backward()

    def _expect_gradients(self, loss: torch.Tensor) -> None:
        if self._wrapped.static_graph:
            return
        searched = [loss] if self._wrapped.find_unused_parameters else []
        self._wrapped.reducer.prepare_for_forward()
        self._wrapped.reducer.prepare_for_backward(searched)

    def finish_gradients(self) -> None:
        """Check that every trained parameter has a gradient, if they are all expected.

        If a gradient is missing, DDP does not reduce the rest of its bucket, and reports that only
        in the next step, by parameter index. By then the weights have been updated with gradients
        that were not averaged.
        """
        if self.expects_all:
            self.expects_all = False
            _check_all_came(self._wrapped.module)

    def private_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Stateful]:
        """Return the compressor's state."""
        compressor = self.communication.compressor
        return {} if compressor is None else {"communication": compressor}

    def watch_waits(self, waiting: Waiting) -> None:
        """Count the time after the last gradient as waiting; before it, backward hides it."""
        waiting.watch_gradients(self.inner.parameters())

    def choices(self) -> list[Choice]:
        """Return what `compression: auto` chose before the run; a trial chooses later."""
        why = self.communication.why_none
        return [_settled("none", why)] if why else []

    def notes(self) -> list[str]:
        """Report that a compressor is being tried."""
        return [self.communication.note] if self.communication.note else []

    def when_settled(self, tell: Callable[[Choice], None]) -> None:
        """Report the result of the `compression: auto` trial, also of one in an earlier attempt."""
        trial = self.communication.compressor
        if not isinstance(trial, Trial):
            return
        trial.when_settled = lambda name, why: tell(_settled(name, why))
        if trial.choice:
            tell(_settled(trial.choice, "as chosen in an earlier attempt of this run"))


class DDPOfSeveral(DDPModel):
    """One of several models: a loss may run through it and belong to another."""

    def __init__(
        self, wrapped: DistributedDataParallel, num_ranks: int, installed: Installed
    ) -> None:
        super().__init__(wrapped, num_ranks, installed)
        self.can_replay = False

    def backward(self, loss: torch.Tensor) -> None:
        """Add gradients to this model's own weights only."""
        if self._is_last:
            self._expect_gradients(loss)
        backward_to(self.inner, loss)


def _settled(name: str, why: str) -> Choice:
    said = f"communication: {'plain gradients' if name == 'none' else name}; {why}"
    return Choice("communication.compression", name, why, said)


def _check_all_came(model: nn.Module) -> None:
    missing = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ConfigError(
            [
                Problem(
                    "parallel.ddp.find_unused_parameters",
                    f"the loss does not depend on {missing[0]}{more}",
                    "set it to true, or freeze unused parameters (requires_grad_(False))",
                    has_value=False,
                )
            ]
        )

"""Engine: one optimizer step on one global batch, with any strategy.

The loss of a step is  Σ sums / Σ counts  over all micro-batches of all ranks. Backward runs before
the counts of the other ranks are known, so it divides by the number of samples in the global batch,
which every rank knows in advance. If the count is something else (tokens), the gradients are
corrected once at the end, in the pass that clips them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from drivetrain.config.schema import RunConfig
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.core.stateful import Stateful
from drivetrain.data.batches import MicroBatch
from drivetrain.data.keys import MODEL, fold, turn_seed
from drivetrain.data.seeding import seed_model
from drivetrain.parallel.batch_norm import Sharers
from drivetrain.parallel.clock import Waiting, clock_of
from drivetrain.parallel.expert.load import ExpertLoad
from drivetrain.parallel.gather import Gathering
from drivetrain.parallel.loss_parallel import LossOverParts
from drivetrain.parallel.model import ParallelModel
from drivetrain.parallel.world import World
from drivetrain.train.averages import Averages
from drivetrain.train.numerics.precision import found_inf, make_autocast, make_scaler
from drivetrain.train.optimization.groups import keep_kinds_apart
from drivetrain.train.optimization.schedule import LearningRate
from drivetrain.train.refusals import check_loss, why_not_gathered
from drivetrain.train.several.optimizers import members
from drivetrain.train.task import Loss, LossAndParts, Total, split
from drivetrain.train.watch.leftovers import WatchedZeroGrad
from drivetrain.train.watch.meter import Meter
from drivetrain.train.watch.sentinel import Sentinel
from drivetrain.train.watch.step_timer import StepTimer


class Engine:
    """Computes steps for `Trainer` and for `KeptLoop`."""

    def __init__(
        self,
        config: RunConfig,
        world: World,
        spread: ParallelModel,
        optimizer: torch.optim.Optimizer,
        learning_rate: LearningRate,
        part_of: Engine | None = None,
    ) -> None:
        self.world = world
        self.spread = spread
        self.optimizer = optimizer
        self.learning_rate = learning_rate
        self.scaler = make_scaler(config.precision, world.device)
        self.meter = Meter(world, counts=spread.counts)
        clock = clock_of(world.accelerator)
        self.waiting: Waiting = Waiting(clock) if part_of is None else part_of.waiting
        """Time this rank waited for others since the timer last asked."""
        spread.watch_waits(self.waiting)
        self.timer = StepTimer(clock, self.waiting)
        self.autocast = make_autocast(config.precision, world.device)
        """Context of the forward pass."""
        tensor = config.parallel.tensor
        self._is_loss_parallel = config.parallel.tp > 1 and tensor.loss_parallel
        self.sentinel = Sentinel.of(config, world, spread.inner)
        """Each of several models has its own."""
        self._max_grad_norm = config.optimization.max_grad_norm
        self._logging_steps = config.record.logging_steps
        self._stream = fold(config.seed, MODEL)
        self._gathering = Gathering(world, why_not_gathered(config, spread))
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.before_change: Callable[[], None] | None = None
        """Called before the weights change, for a save that is still copying them."""
        self.sharers: Sharers | None = None
        """Set if ranks share batch norm's statistics."""
        self.expert_load: ExpertLoad | None = None
        """Tokens per expert, if the model has experts."""
        self.averages: Averages | None = None
        """Moving average of the weights, if one was requested."""
        for each in members(optimizer):
            keep_kinds_apart(each)
        own = type(optimizer).zero_grad
        self._has_own_zero_grad = own is not torch.optim.Optimizer.zero_grad

    @property
    def model(self) -> nn.Module:
        """The module to compute a training loss with."""
        return self.spread.module

    def ends_at(self, total_steps: int | None) -> None:
        """Set the run's last step, when it changes."""
        self.learning_rate.ends_at(total_steps)

    def micro_batch(
        self, micro: MicroBatch, *, is_last: bool, stage: int = 0
    ) -> AbstractContextManager[None]:
        """Context of a micro-batch's forward and backward: its random streams and communication.

        In a pipeline it is the context of one stage's forward, and each stage has its own streams;
        so has each pass over the same micro-batches, if there are several.
        """
        seed = turn_seed(self._stream, micro.step, micro.index)
        seed_model(fold(seed, stage) if stage else seed, self.world.device)
        if self.sharers is not None:
            self.sharers.counts = micro.num_samples > 0
        if self.expert_load is not None:
            self.expert_load.counts = micro.num_samples > 0
        traffic = self.spread.micro_batch(micro.index, is_last=is_last)
        if self._is_loss_parallel:  # there is no communication then
            traffic = LossOverParts()
        return self._gathering.of(
            traffic,
            num_samples=micro.num_samples,
            batch_samples=micro.batch_samples,
            is_last=is_last,
        )

    def scalers(self) -> dict[str, Stateful]:
        """Return the fp16 scalers to save, by name."""
        return {} if self.scaler is None else {"scaler": self.scaler}

    def wants(self, micro: MicroBatch) -> bool:
        """True if the micro-batch must be computed: it has samples, or other ranks wait for it."""
        self.meter.note_batch(micro)
        return micro.num_samples > 0 or self.spread.needs_every_turn

    def backward(
        self, loss: Loss | LossAndParts, micro: MicroBatch, *, is_noted: bool = True
    ) -> None:
        """Add this micro-batch's gradients, weighted by its real number of samples."""
        scaled = self.weighted(loss, micro)
        if self.scaler is not None:
            scaled = self.scaler.scale(scaled)
        if self.spread.engine_step is not None:
            self.spread.engine_step.backward(scaled)
        else:
            self.spread.backward(scaled)
        self.waiting.after_backward()
        if is_noted:
            self.note_loss(loss, micro)

    def weighted(self, found: Loss | LossAndParts, micro: MicroBatch) -> torch.Tensor:
        """Return the micro-batch's share of the global batch's loss, to call backward on."""
        check_loss(found)
        loss, _ = split(found)
        weight = self.spread.loss_multiplier / micro.batch_samples
        if isinstance(loss, Total):
            return loss.sum * (weight if micro.num_samples else 0.0)
        weight *= micro.num_samples
        return loss if weight == 1.0 else loss * weight

    def note_loss(self, found: Loss | LossAndParts, micro: MicroBatch) -> None:
        """Keep a micro-batch's loss and its parts for the log."""
        if not micro.num_samples:
            return
        loss, parts = split(found)
        self.meter.add(loss, micro)
        if parts:
            self.meter.add_parts(parts, micro)

    def complete_gradients(self, step: int) -> None:
        """Reduce, unscale, correct and clip the gradients; `step` counts from 0."""
        began = self.waiting.now()
        self.spread.finish_gradients()
        self.waiting.since(began)
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if self.spread.engine_step is None:
            self._scale_gradients(is_logged=(step + 1) % self._logging_steps == 0)

    def step(self, step: int) -> None:
        """Update the weights with this step's learning rate and clear the gradients."""
        self.learning_rate.before_step(step)
        if self.before_change is not None:
            self.before_change()
        if self.spread.engine_step is not None:
            self.meter.grad_norm = self.spread.engine_step.step(self.meter.count_correction())
        else:
            self._step_optimizer()
        if self.expert_load is not None:
            self.expert_load.end_step()
        if self.averages is not None:
            self.averages.update()
        self.meter.end_step(step + 1, self.learning_rate.current)
        self.learning_rate.after("step")
        if self.sentinel is not None and self.spread.engine_step is None:
            self.sentinel.after_step(step + 1)

    def compare_copies(self, step: int) -> None:
        """ReplicaDrift if the model's copies differ, which would be saved as one. Collective.

        The script may have changed weights since the step's own check.
        """
        if self.sentinel is not None and self.spread.engine_step is None and step:
            self.sentinel.check(step)

    def _step_optimizer(self) -> None:
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.meter.note_scaler(found_inf(self.scaler, self.optimizer, self.world.device))
            self.scaler.update()
        else:
            self.optimizer.step()
        self._forget_gradients()

    def evaluated_weights(self) -> AbstractContextManager[None]:
        """Context of an evaluation: with the averaged weights if they are to be evaluated."""
        if self.averages is None or not self.averages.is_evaluated:
            return nullcontext()
        return self.averaged(self.averages)

    def averaged(self, averages: Averages) -> AbstractContextManager[None]:
        """Context in which the model has the averaged weights."""
        if self.before_change is not None:
            self.before_change()
        return averages.applied()

    def agree_on_rate(self) -> None:
        """ConfigError on a rank whose rate differs from rank 0's. Collective.

        With different rates, the copies of the model would diverge.
        """
        if not self.learning_rate.is_the_scripts or self.world.layout.pp > 1:
            return  # stages may differ in their first group
        own = repr(self.learning_rate.current)
        if (first := self.world.agree(own)) != own:
            rule = f"on rank {self.world.rank}, but {first} on rank 0"
            remedy = "derive it from what every rank knows: the step, or the result of evaluate()"
            raise ConfigError([Problem("learning rate", rule, remedy, own)])

    def _forget_gradients(self) -> None:
        """Do what torch's zero_grad does, without its profiler label, which doubles the cost."""
        replaced_by = vars(self.optimizer).get("zero_grad")
        if isinstance(replaced_by, WatchedZeroGrad):
            replaced_by = replaced_by.replaced_by
        if self._has_own_zero_grad or replaced_by is not None:
            self.optimizer.zero_grad()
            return
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def _scale_gradients(self, *, is_logged: bool) -> None:
        """Correct for counts other than samples and clip, in one pass over the gradients."""
        correction = self.meter.count_correction()
        if correction is None and self._max_grad_norm is None and not is_logged:
            return
        gradients = [grad for p in self._parameters if (grad := p.grad) is not None]
        if not gradients:
            return
        scale = correction
        if self._max_grad_norm is not None or is_logged:
            norm = self.spread.total_norm(gradients)
            if correction is not None:
                norm = norm * correction
            self.meter.grad_norm = norm
            if self._max_grad_norm is not None:
                # max_grad_norm / (norm + 1e-6), at most 1: in one new tensor instead of four
                clip = norm.add(1e-6).reciprocal_().mul_(self._max_grad_norm).clamp_(max=1.0)
                scale = clip if scale is None else clip * scale
        if scale is not None:
            local = self.spread.local(gradients)
            # fsdp's offloaded gradients are on the CPU, so the scale must be read there
            torch._foreach_mul_(local, scale.to(local[0].device))

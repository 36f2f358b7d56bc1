"""Planted bugs: each a way in which data or model parallelism really goes wrong.

A mutant acts only among several ranks, so that the reference stays healthy. It changes objects of
its own run and nothing else. By DRIVETRAIN_HOOKS it can be planted in any script's run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel

from drivetrain.data.batches import MicroBatch
from drivetrain.data.feed import MapFeed, Turn
from drivetrain.parallel.parts import whole
from drivetrain.strategies.ddp.communication import Installed
from drivetrain.strategies.ddp.strategy import DDPModel
from drivetrain.train.engine import Engine
from drivetrain.train.hooks import Hook
from drivetrain.train.task import Loss, Total
from drivetrain.train.trainer import Trainer
from drivetrain.verify.parity.trace import TraceStage, around

FIRST_USED, LAST_USED = "tokens.weight", "head.weight"


@dataclass(frozen=True)
class Expected:
    """Where the certificate must find a mutant."""

    stage: TraceStage
    place: str
    step: int = 1
    ranks: tuple[int, ...] = (0, 1)


class Mutant(Hook):
    """Planted at the start of a run on several ranks."""

    expected: ClassVar[Expected]
    layout: ClassVar[str] = "ddp:2"

    def on_fit_start(self, trainer: Trainer) -> None:
        assert trainer.assembly is not None
        world = trainer.assembly.world
        self.is_planted = world.identity.world_size > 1
        self.is_last_rank = world.identity.rank == world.identity.world_size - 1
        if self.is_planted:
            self.plant(trainer, trainer.assembly.engine)

    def plant(self, trainer: Trainer, engine: Engine) -> None:
        """Break something."""


class WrongLossScaling(Mutant):
    """The loss is multiplied by the number of ranks once too often."""

    expected = Expected(TraceStage.BACKWARD, LAST_USED)

    def plant(self, trainer: Trainer, engine: Engine) -> None:
        engine.spread.loss_multiplier *= 2


class TokensCountedPerRank(Mutant):
    """Each rank divides by its own number of tokens."""

    expected = Expected(TraceStage.CLIPPING, "gradient norm")

    def plant(self, trainer: Trainer, engine: Engine) -> None:
        meter = engine.meter

        def counted_here(original: Callable[[], Any]) -> Callable[[], Any]:
            def count_correction() -> torch.Tensor:
                original()
                count = float(sum(float(part) for part in meter._open.counts))
                return torch.tensor(meter._open.batch_samples / (2 * max(1.0, count)))

            return count_correction

        around(meter, "count_correction", counted_here)


class NoAllReduce(Mutant):
    """Gradients never travel."""

    expected = Expected(TraceStage.BACKWARD, LAST_USED)

    def plant(self, trainer: Trainer, engine: Engine) -> None:
        def silent(_: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *_: None

        around(engine.spread, "_expect_gradients", silent)


class OneParameterNotReduced(Mutant):
    """One parameter is left out of the all-reduce."""

    expected = Expected(TraceStage.BACKWARD, "blocks.1.norm2.weight")

    def plant(self, trainer: Trainer, engine: Engine) -> None:
        inner = engine.spread.inner
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            inner, [self.expected.place]
        )
        engine.spread = DDPModel(DistributedDataParallel(inner), dist.get_world_size(), Installed())


class NotInTheOptimizer(Mutant):
    """A parameter nobody handed to the optimizer."""

    expected = Expected(TraceStage.MEMBERS, "blocks.0.mlp.0.weight", step=0)

    def plant(self, trainer: Trainer, engine: Engine) -> None:
        left_out = engine.spread.inner.get_parameter(self.expected.place)
        for group in engine.optimizer.param_groups:
            group["params"] = [p for p in group["params"] if p is not left_out]
        engine._parameters = [p for p in engine._parameters if p is not left_out]


class DropoutByRank(Mutant):
    """Random streams follow the rank instead of the micro-batch."""

    expected = Expected(TraceStage.FORWARD, "blocks.0.dropout", ranks=(1,))

    def plant(self, trainer: Trainer, engine: Engine) -> None:
        engine._stream += engine.world.rank


class StaleBatchNorm(Mutant):
    """One rank's batch norm was left in evaluation: it uses its running statistics."""

    expected = Expected(TraceStage.FORWARD, "norm", ranks=(1,))

    def on_train_batch_start(self, trainer: Trainer, step: int) -> None:
        if self.is_planted and self.is_last_rank:
            trainer.model.get_submodule("norm").eval()


class SwappedShards(Mutant):
    """Two ranks have each other's shard of a weight, from the third step on."""

    expected = Expected(TraceStage.UPDATE, "blocks.0.qkv.weight", step=3)
    layout = "fsdp:2"

    def on_train_batch_end(self, trainer: Trainer, step: int) -> None:
        if self.is_planted and step == 3:
            weight = trainer.model.get_parameter(self.expected.place)
            assert isinstance(weight, DTensor)
            mine = weight.to_local().detach()
            both = [torch.empty_like(mine) for _ in range(2)]
            dist.all_gather(both, mine.contiguous())
            mine.copy_(both[1 - dist.get_rank()])


class ShiftedShard(Mutant):
    """A shard boundary is off by one: the gradient's rows land one too far."""

    expected = Expected(TraceStage.BACKWARD, "blocks.1.mlp.0.weight")
    layout = "fsdp:2"

    def plant(self, trainer: Trainer, engine: Engine) -> None:
        def shift(gradients: dict[str, torch.Tensor]) -> None:
            gradient = gradients[self.expected.place]
            assert isinstance(gradient, DTensor)
            local = gradient.to_local()
            if self.is_last_rank:
                local.copy_(local.roll(1, 0))

        after_backward(engine, shift)


class ClippedByLocalNorm(Mutant):
    """Each rank clips by the norm of its own shards."""

    expected = Expected(TraceStage.CLIPPING, "gradient norm")
    layout = "fsdp:2"

    def plant(self, trainer: Trainer, engine: Engine) -> None:
        def local(_: Callable[..., Any]) -> Callable[..., Any]:
            def total_norm(gradients: list[torch.Tensor]) -> torch.Tensor:
                return torch.nn.utils.get_total_norm(engine.spread.local(gradients))

            return total_norm

        around(engine.spread, "total_norm", local)


class AveragedTwice(Mutant):
    """The engine averages, and the loop once more."""

    expected = Expected(TraceStage.BACKWARD, LAST_USED)

    def plant(self, trainer: Trainer, engine: Engine) -> None:
        def halve(gradients: dict[str, torch.Tensor]) -> None:
            torch._foreach_div_(list(gradients.values()), 2.0)

        after_backward(engine, halve)


class LastMicroBatchDropped(Mutant):
    """Accumulation forgets a rank's last micro-batch."""

    expected = Expected(TraceStage.BACKWARD, LAST_USED)

    def plant(self, trainer: Trainer, engine: Engine) -> None:
        if not self.is_last_rank:
            return

        def forgetful(original: Callable[..., None]) -> Callable[..., None]:
            def backward(loss: Loss, micro: MicroBatch, **said: bool) -> None:
                assert isinstance(loss, Total)
                if micro.index == 3:
                    loss = replace(loss, sum=loss.sum.detach() + loss.sum * 0)
                original(loss, micro, **said)

            return backward

        around(engine, "backward", forgetful)


class SameSamplesTwice(Mutant):
    """Two ranks read the same samples."""

    expected = Expected(TraceStage.DATA, "batch[0]", ranks=(1,))

    def plant(self, trainer: Trainer, engine: Engine) -> None:
        assert trainer.assembly is not None
        feed = trainer.assembly.feed
        assert isinstance(feed, MapFeed)
        if not self.is_last_rank:
            return
        other = MapFeed(feed._source, feed.plan, 0, feed._seed)

        def mistaken(original: Callable[..., Any]) -> Callable[..., Any]:
            def steps(*arguments: Any) -> Iterator[Iterator[Turn]]:
                for mine, theirs in zip(original(*arguments), other.steps(*arguments), strict=True):
                    yield (
                        (micro, batch) for (micro, _), (_, batch) in zip(mine, theirs, strict=True)
                    )

            return steps

        around(feed, "steps", mistaken)


class LearningRateAStepAhead(Mutant):
    """One rank's schedule is a step further on."""

    expected = Expected(TraceStage.SETTINGS, "learning rate of group 0", ranks=(1,))

    def plant(self, trainer: Trainer, engine: Engine) -> None:
        if self.is_last_rank:
            around(
                engine.learning_rate,
                "before_step",
                lambda original: lambda step: original(step + 1),
            )


class BlockWithoutGradient(Mutant):
    """One block's gradients are zero on one rank."""

    expected = Expected(TraceStage.BACKWARD, "blocks.1.mlp.2.weight")

    def plant(self, trainer: Trainer, engine: Engine) -> None:
        if self.is_last_rank:
            for parameter in engine.spread.inner.get_submodule("blocks.1").parameters():
                parameter.register_hook(torch.zeros_like)


class WeightDecaySkipped(Mutant):
    """The optimizer forgets weight decay while it steps."""

    expected = Expected(TraceStage.UPDATE, FIRST_USED)

    def plant(self, trainer: Trainer, engine: Engine) -> None:
        def without(original: Callable[..., Any]) -> Callable[..., Any]:
            def step() -> Any:
                group = engine.optimizer.param_groups[0]  # the other one has none
                decay, group["weight_decay"] = group["weight_decay"], 0.0
                result = original()
                group["weight_decay"] = decay
                return result

            return step

        around(engine.optimizer, "step", without)


class OtherInitialWeight(Mutant):
    """One rank starts from another weight."""

    expected = Expected(TraceStage.START, "blocks.1.out.bias", step=0, ranks=(1,))

    def plant(self, trainer: Trainer, engine: Engine) -> None:
        if self.is_last_rank:
            with torch.no_grad():
                engine.spread.inner.get_parameter(self.expected.place).add_(0.05)


class GradientsKept(Mutant):
    """One rank does not zero its gradients."""

    expected = Expected(TraceStage.BACKWARD, LAST_USED, step=2)

    def plant(self, trainer: Trainer, engine: Engine) -> None:
        if self.is_last_rank:
            around(engine.optimizer, "zero_grad", lambda _: lambda: None)


class LowerPrecision(Mutant):
    """One rank computes a layer in 8 bits."""

    expected = Expected(TraceStage.FORWARD, "blocks.1.mlp.0", ranks=(1,))

    def plant(self, trainer: Trainer, engine: Engine) -> None:
        if self.is_last_rank:

            def rounded(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
                return output.to(torch.float8_e4m3fn).float()

            engine.spread.inner.get_submodule(self.expected.place).register_forward_hook(rounded)


class MomentsLost(Mutant):
    """One rank's optimizer forgets its state half-way."""

    expected = Expected(TraceStage.UPDATE, FIRST_USED, step=6, ranks=(1,))

    def on_train_batch_start(self, trainer: Trainer, step: int) -> None:
        if self.is_planted and self.is_last_rank and step == 6:
            assert trainer.assembly is not None
            trainer.assembly.engine.optimizer.state.clear()


class CopiesNotAveraged(Mutant):
    """hsdp reduces gradients inside each copy, and never over the copies."""

    expected = Expected(TraceStage.BACKWARD, LAST_USED, ranks=(0, 1, 2, 3))
    layout = "hsdp:2x2"

    def plant(self, trainer: Trainer, engine: Engine) -> None:
        alone, _ = dist.new_subgroups(group_size=1)
        for module in engine.spread.inner.modules():
            if isinstance(module, FSDPModule):
                for group in module._get_fsdp_state()._fsdp_param_groups:
                    object.__setattr__(group.mesh_info, "replicate_process_group", alone)


class LossInsideLossParallel(Mutant):
    """The whole loss runs inside torch's loss_parallel(), its log_softmax without a backward."""

    expected = Expected(TraceStage.BACKWARD, LAST_USED)
    layout = "tp+loss:2"

    def plant(self, trainer: Trainer, engine: Engine) -> None:
        def around_all(original: Callable[..., Any]) -> Callable[..., Any]:
            def micro_batch(*args: Any, **kwargs: Any) -> Any:
                original(*args, **kwargs)  # seeds the random streams
                return loss_parallel()

            return micro_batch

        def of_a_whole(original: Callable[..., None]) -> Callable[..., None]:
            return lambda loss, micro: original(replace(loss, sum=whole(loss.sum)), micro)

        around(engine, "micro_batch", around_all)
        around(engine, "note_loss", of_a_whole)


def after_backward(engine: Engine, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change complete gradients."""

    def then(original: Callable[[], None]) -> Callable[[], None]:
        def finish_gradients() -> None:
            original()
            named = engine.spread.inner.named_parameters()
            change({name: p.grad for name, p in named if p.grad is not None})

        return finish_gradients

    around(engine.spread, "finish_gradients", then)


MUTANTS: dict[str, type[Mutant]] = {mutant.__name__: mutant for mutant in Mutant.__subclasses__()}

"""ddp: a full copy of the model per rank; gradients are averaged while backward runs."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from drivetrain.cluster.description import Cluster
from drivetrain.config.schema import DDP, Communication
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.parallel.communication.choose import sent_bytes
from drivetrain.parallel.communication.install import Installed, install_compression
from drivetrain.parallel.layout import Layout
from drivetrain.parallel.strategy import Cost, Profile, Spread, memory_problems
from drivetrain.parallel.whole import NOTHING, Whole
from drivetrain.parallel.world import World


class DDPStrategy:
    """torch's DistributedDataParallel."""

    name = "ddp"

    def __init__(self, config: DDP, communication: Communication | None = None) -> None:
        self._config = config
        self._communication = communication or Communication()

    def problems(self, profile: Profile, layout: Layout, cluster: Cluster) -> list[Problem]:
        """A full copy must fit on a device."""
        remedy = "use parallel.strategy=fsdp, which shards all three"
        if layout.dp > 1 and layout.dp < layout.world_size:
            return [
                Problem(
                    "parallel.strategy",
                    f"ddp cannot copy a model that is itself shared by ranks ({layout})",
                    "use fsdp",
                    "ddp",
                )
            ]
        return memory_problems(self.cost(profile, layout, cluster), cluster, remedy)

    def cost(self, profile: Profile, layout: Layout, cluster: Cluster) -> Cost:  # noqa: ARG002
        """Everything in full; a ring all-reduce sends each gradient (n - 1)/n times, twice."""
        ranks = layout.dp
        return Cost(
            profile.parameter_bytes,
            profile.gradient_bytes,
            profile.optimizer_bytes,
            sent_bytes(self._communication, profile.gradient_bytes, ranks),
        )

    def apply(self, model: nn.Module, world: World) -> Spread:
        """Wrap the model; a single rank needs no wrapper."""
        model.to(world.device)
        if world.layout.dp == 1:
            return Whole(model, counts=world.speaks_for_samples)
        wrapped = DistributedDataParallel(
            model,
            bucket_cap_mb=self._config.bucket_cap_mb,
            find_unused_parameters=self._config.find_unused_parameters,
            gradient_as_bucket_view=self._config.gradient_as_bucket_view,
            static_graph=self._config.static_graph,
        )
        if not self._config.find_unused_parameters:
            _settle_buckets(wrapped)
        # after that backward, so that no compressor keeps anything of it
        installed = install_compression(self._communication, wrapped, world.device)
        spread = Replicated(wrapped, world.layout.dp, installed)
        spread.expects_all = not self._config.find_unused_parameters
        return spread


def _settle_buckets(wrapped: DistributedDataParallel) -> None:
    """Let DDP order its buckets now, the same way at every start.

    DDP reorders them after its first backward, by the order in which gradients arrived. From three
    ranks on, where a gradient lies in a bucket decides in which order it is added up, so that the
    first step after a resume would differ in its last bits from the same step of a run that was
    never interrupted. A backward of zeros, in the parameters' own order, comes first instead.
    """
    parameters = [p for p in wrapped.module.parameters() if p.requires_grad]
    zero = sum((p * 0).sum() for p in parameters)
    wrapped.reducer.prepare_for_forward()
    wrapped.reducer.prepare_for_backward([])
    if isinstance(zero, torch.Tensor):
        zero.backward()
    for parameter in parameters:
        parameter.grad = None


class Replicated(Whole):
    """A DDP-wrapped model. Each rank holds the averaged gradients in full, as `Whole` does."""

    needs_every_turn = True
    expects_all = False
    """Whether every parameter must have a gradient in the first step."""

    def __init__(
        self, wrapped: DistributedDataParallel, num_ranks: int, installed: Installed
    ) -> None:
        super().__init__(wrapped.module)
        self.communication = installed
        self.module = wrapped
        self.loss_multiplier = float(num_ranks)  # DDP divides by the number of ranks
        self._wrapped = wrapped

    def micro_batch(self, index: int, *, is_last: bool) -> AbstractContextManager[None]:  # noqa: ARG002
        """Only the last micro-batch synchronises."""
        return NOTHING if is_last else self._wrapped.no_sync()

    def finish_gradients(self) -> None:
        """DDP leaves the rest of a bucket alone when one of its gradients never comes.

        It says so only in the next step, by number; by then weights have moved by gradients that
        were not averaged.
        """
        if self.expects_all:
            self.expects_all = False
            _check_all_came(self._wrapped.module)


def _check_all_came(model: nn.Module) -> None:
    missing = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ConfigError(
            [
                Problem(
                    "parallel.ddp.find_unused_parameters",
                    f"the loss does not depend on {missing[0]}{more}",
                    "set it to true, or freeze what is not trained (requires_grad_(False))",
                    has_value=False,
                )
            ]
        )

"""parameter_server: ranks push gradients to the rank that owns a weight, and pull weights back.

Every rank has two roles. As a worker it computes gradients on its share of the batch with a full
copy of the weights. As a server it owns some of the parameters with their optimizer state. Each
parameter is kept in full, so that any optimizer works as on a single device.

    worker:  gradients → push to every server → wait for the replies → weights of the next step
    server:  push → update of its shard → reply

The modes differ in when a server updates and when it replies (`server.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from drivetrain.cluster.description import Cluster
from drivetrain.config.schema import RunConfig
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.core.text import readable_bytes
from drivetrain.parallel.clock import Waiting
from drivetrain.parallel.layout import Layout
from drivetrain.parallel.model import EngineStep, LocalSteps, ParallelModel, own_name
from drivetrain.parallel.parts import total_norm
from drivetrain.parallel.world import World
from drivetrain.strategies.cost import Use
from drivetrain.strategies.parameter_server import ParameterServer
from drivetrain.strategies.parameter_server.cost import COST
from drivetrain.strategies.parameter_server.links import Links
from drivetrain.strategies.parameter_server.messages import Push, pack, rows_to_send, unpack
from drivetrain.strategies.parameter_server.server import Rules, Server
from drivetrain.strategies.single import SingleModel
from drivetrain.strategies.strategy import Cost, Profile, Strategy, cost_now, memory_problems


def make(config: RunConfig, micro_batch_blocks: list[range]) -> Strategy:
    return ParameterServerStrategy(config)


class ParameterServerStrategy(Strategy):
    """A full copy per rank to compute with, and a shard of everything to serve."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._settings = config.parallel.details(ParameterServer)

    def problems(self, profile: Profile, layout: Layout, cluster: Cluster) -> list[Problem]:
        """Check that a full copy fits on a device."""
        remedy = "use parallel.strategy=fsdp, which shards them"
        return memory_problems(self.cost(profile, layout, cluster), cluster, remedy)

    def cost(self, profile: Profile, layout: Layout, cluster: Cluster) -> Cost:
        """Return the cost: full weights and gradients; optimizer state in shards, on the host."""
        use = Use(layout, self._settings, profile.micro_batches_per_step)
        return cost_now(COST, profile, use)

    def apply(self, model: nn.Module, world: World) -> ParallelModel:
        """Move the model to the device and broadcast rank 0's weights."""
        model.to(world.device)
        world.share_weights(model)
        return ServedModel(model, self._config, world)


@dataclass
class Staleness:
    """The staleness of one rank's pushes."""

    total: int = 0
    largest: int = 0
    num_pushes: int = 0

    def note(self, staleness: int) -> None:
        self.total += staleness
        self.largest = max(self.largest, staleness)
        self.num_pushes += 1


class ServedModel(SingleModel):
    """A worker's copy of the model, and this rank's server."""

    can_replay = False

    def __init__(self, model: nn.Module, config: RunConfig, world: World) -> None:
        super().__init__(model)
        settings = config.parallel.details(ParameterServer)
        self._settings = settings
        self._world = world
        self._max_grad_norm = config.optimization.max_grad_norm
        self._timeout_s = config.parallel.timeout_s
        self._is_synchronous = settings.mode == "synchronous"
        self._num_ranks = world.layout.world_size
        self.engine_step: EngineStep | None = self
        self.local_steps: LocalSteps | None = None if self._is_synchronous else self
        self.steps_apart = not self._is_synchronous
        self._total_steps: int | None = None
        self._clock = 0
        self._versions = [0] * self._num_ranks
        """By server: the version of its weights in this rank's copy."""
        self._edits = 0
        """Number of in-place changes of the copy at the last pull."""
        self._waiting = Waiting()
        self.staleness = Staleness()
        """Over this attempt."""
        self._recent = Staleness()

    # Before the first step.

    def take_over(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimizer's weights among the servers, and start to serve. Collective."""
        self._optimizer = optimizer
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        named = [(own_name(n), p) for n, p in self.inner.named_parameters() if id(p) in stepped]
        owners = assign([p.nbytes for _, p in named], self._num_ranks)
        self._shards: list[list[tuple[str, nn.Parameter]]] = [
            [each for each, owner in zip(named, owners, strict=True) if owner == rank]
            for rank in range(self._num_ranks)
        ]
        self._servers = [rank for rank, shard in enumerate(self._shards) if shard]
        self._links = Links(self._world, len(optimizer.param_groups), self._timeout_s)
        bound = self._settings.staleness_bound
        rules = Rules(
            num_workers=self._num_ranks,
            is_synchronous=self._is_synchronous,
            bound=bound if self._settings.mode == "stale_synchronous" else None,
            sparse_rows=self._settings.sparse_rows,
        )
        own = [p for _, p in self._shards[self._world.rank]]
        self._server = Server(own, optimizer, rules, self._links.answer)
        self._links.serve(self._server)

    def notes(self) -> list[str]:
        """Report how even the shards are, and what the mode means."""
        sizes = [sum(p.nbytes for _, p in shard) for shard in self._shards]
        largest, num = max(sizes), len(self._servers)
        said = f"parameter server: {num} of {self._num_ranks} ranks serve weights"
        said += f", largest shard {readable_bytes(largest)} of {readable_bytes(sum(sizes))}"
        if self._is_synchronous:
            return [f"{said}; synchronous"]
        mode = self._settings.mode.replace("_", " ")
        return [
            f"{said}; {mode}: gradients are applied to weights that other ranks have updated "
            "meanwhile, so two runs with the same seed differ; the number of such updates is "
            "recorded as staleness/mean and staleness/max; ranks synchronize at each log, "
            "evaluation and checkpoint"
        ]

    def watch_waits(self, waiting: Waiting) -> None:
        self._waiting = waiting

    # A step.

    def finish_gradients(self) -> None:
        """Synchronous: push gradients to the servers, unscaled. Otherwise `step` does it."""
        if self._is_synchronous:
            self._push_all()

    def step(self, correction: torch.Tensor | None) -> torch.Tensor:
        """Take the servers' replies. Return the gradient norm before clipping."""
        norm = None
        if not self._is_synchronous:
            norm = self._scale_own(correction)
            self._push_all()
        with self._waiting.around():
            if norm is None:
                norm = self._update_all(correction)
            self._take_replies()
        return norm

    def _push_all(self) -> None:
        """Push this step's gradients to every server, and clear them here."""
        self._begin()
        self._clock += 1
        is_pulled = self._clock % self._settings.pull_every == 0
        rates = self._rates()
        for server in self._in_turn():
            self._links.push(server, self._push_for(server, rates, is_pulled))
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def _begin(self) -> None:
        """Copy the current weights to the servers; from then on refuse changes made elsewhere."""
        if not self._links.is_open:
            self._server.start_from_model()
            self._versions = self._all_versions()
            self._clock = 0
            self._edits = self._count_edits()
            self._links.open()
        elif self._count_edits() != self._edits:
            rule = "its weights were changed in place between two steps, and no server sees that"
            remedy = "change them before the first step, or use parallel.strategy=ddp"
            raise ConfigError([Problem("model", rule, remedy, has_value=False)])

    def _in_turn(self) -> list[int]:
        """Return the servers in this worker's order: from the next rank's to its own."""
        own = self._world.rank
        return sorted(self._servers, key=lambda server: (server - own - 1) % self._num_ranks)

    def _rates(self) -> tuple[float, ...]:
        divided = not self._is_synchronous and self._settings.learning_rate == "per_rank"
        by = self._num_ranks if divided else 1
        return tuple(float(group["lr"]) / by for group in self._optimizer.param_groups)

    def _scale_own(self, correction: torch.Tensor | None) -> torch.Tensor:
        """Correct and clip this rank's gradients separately."""
        gradients = [p.grad for s in self._shards for _, p in s if p.grad is not None]
        if not gradients:
            return torch.zeros(())
        norm, scale = self._clipped(total_norm(gradients), correction)
        torch._foreach_mul_(gradients, scale)
        return norm

    def _clipped(
        self, norm: torch.Tensor, correction: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the corrected norm, and the factor for the gradients."""
        scale = torch.ones((), device=norm.device) if correction is None else correction
        norm = norm * scale
        if self._max_grad_norm is not None:
            scale = scale * (self._max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        return norm, scale

    def _push_for(self, server: int, rates: tuple[float, ...], is_pulled: bool) -> Push:
        gradients = [p.grad for _, p in self._shards[server]]
        rows = [self._rows_of(gradient) for gradient in gradients]
        payload = pack(gradients, rows)
        version = self._versions[server]
        return Push(self._world.rank, self._clock, version, is_pulled, rates, payload)

    def _rows_of(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        if not self._settings.sparse_rows or gradient is None or gradient.ndim != 2:
            return None
        return rows_to_send(gradient, gradient.ne(0).any(1))

    def _update_all(self, correction: torch.Tensor | None) -> torch.Tensor:
        """Synchronous: clip by the norm over all shards, then update on this rank's server."""
        serves = self._world.rank in self._servers
        squares = 0.0
        if serves:
            self._links.wait_for(self._server.summed)
            squares = self._server.sum_of_squares()
        (total,) = self._world.sum_floats([squares])
        norm = torch.tensor(total, dtype=torch.float64).sqrt().float()
        norm, scale = self._clipped(norm, None if correction is None else correction.cpu())
        if serves:
            self._server.update_all(float(scale), self._rates())
        return norm

    def _take_replies(self) -> None:
        for server in self._in_turn():
            reply = self._links.reply_of(server)
            self.staleness.note(reply.staleness)
            self._recent.note(reply.staleness)
            if reply.weights is not None:
                self._take(server, reply.weights, reply.version)
        self._links.finish_pushes()
        self._edits = self._count_edits()

    def _take(self, server: int, weights: torch.Tensor, version: int) -> None:
        targets = [p for _, p in self._shards[server]]
        for piece, parameter in zip(unpack(weights, targets), targets, strict=True):
            if piece is not None:
                piece.into(parameter)
        self._versions[server] = version

    def _count_edits(self) -> int:
        return sum(p._version for shard in self._shards for _, p in shard)  # noqa: SLF001

    # LocalSteps, for modes in which each rank's gradients are applied separately.

    def is_alone(self, step: int) -> bool:
        return True

    def sum_gradients(self) -> None:
        """Never called: each rank pushes its own gradients."""

    def about_to_move(self, count: torch.Tensor) -> None:
        """Do nothing: a server counts pushes, not samples."""

    def agrees_after(self, step: int) -> bool:
        """Whether this is the run's last step, if that is known."""
        return step + 1 == self._total_steps

    def agree(self) -> None:
        """Pull the weights on all ranks after all have pushed."""
        with self.shown_weights():
            pass

    def ends_at(self, total_steps: int | None) -> None:
        self._total_steps = total_steps

    # What evaluations, checkpoints and logs use.

    @contextmanager
    def shown_weights(self) -> Iterator[bool]:
        """Inside, the copy equals the servers' weights, and servers are paused. A collective call.

        When all ranks are here, no push is in flight. Servers are paused because a rank that leaves
        early pushes to servers whose weights may still be read.
        """
        if not self._links.is_open:
            yield False
            return
        self._world.sum_floats([0.0])
        with self._server.paused:
            if not self._is_synchronous:
                self._pull_all()
            yield True

    def _pull_all(self) -> None:
        """Pull from every server by broadcast, while no server handles pushes."""
        versions = self._all_versions()
        for server in self._servers:
            targets = [p for _, p in self._shards[server]]
            is_own = server == self._world.rank
            nothing: Sequence[None] = [None] * len(targets)
            payload = pack(self._server.weights if is_own else targets, nothing)
            if payload is None:
                continue
            if self._world.mesh is not None:
                dist.broadcast(payload, src=server, group=self._world.host_group)
            self._take(server, payload, versions[server])
        self._edits = self._count_edits()

    def _all_versions(self) -> list[int]:
        own = [0.0] * self._num_ranks
        own[self._world.rank] = float(self._server.version)
        return [int(version) for version in self._world.sum_floats(own)]

    def measured(self) -> dict[str, float]:
        """Return the staleness of the pushes since the last call. A collective call."""
        if self._is_synchronous:
            return {}
        recent, self._recent = self._recent, Staleness()
        largest = [0.0] * self._num_ranks
        largest[self._world.rank] = float(recent.largest)
        sums = [float(recent.total), float(recent.num_pushes), *largest]
        total, num_pushes, *by_rank = self._world.sum_floats(sums)
        return {
            "staleness/mean": total / (num_pushes or 1.0),
            "staleness/max": max(by_rank),
        }

    # Checkpoints: weights by name, and this server's shard of the optimizer state.

    def model_state(self) -> dict[str, torch.Tensor]:
        """Return weights and buffers, all of which every rank has."""
        state = self.inner.state_dict(keep_vars=True)
        tensors = {own_name(n): v for n, v in state.items() if isinstance(v, torch.Tensor)}
        return {name: tensor.detach() for name, tensor in tensors.items()}

    def optimizer_state(self, *, make: bool = False) -> dict[str, Any]:
        """Return tensors of this server's shard, and numbers of all, stored in the manifest."""
        if make:
            self._links.close()
            self._server.make_state()
        state: dict[str, Any] = {}
        for place, (name, _) in enumerate(self._shards[self._world.rank]):
            for key, value in self._server.state_of(place).items():
                if value is not None:
                    state[f"{name}.{key}"] = value
        numbers = {n: v for n, v in state.items() if not isinstance(v, torch.Tensor)}
        return state | self._everyones(numbers)

    def put_back(self, model: Mapping[str, torch.Tensor], optimizer: Mapping[str, Any]) -> None:
        """Set the server's optimizer state. It takes its weights from the model when it opens."""
        for place, (name, _) in enumerate(self._shards[self._world.rank]):
            found = {
                full.removeprefix(f"{name}."): value
                for full, value in optimizer.items()
                if full.rpartition(".")[0] == name
            }
            self._server.set_state(place, found)

    def _everyones(self, numbers: dict[str, Any]) -> dict[str, Any]:
        if self._world.mesh is None:
            return numbers
        parts: list[Any] = [None] * self._num_ranks
        dist.all_gather_object(parts, numbers, group=self._world.host_group)
        return {name: value for part in parts for name, value in part.items()}


def assign(sizes: Sequence[int], num_servers: int) -> list[int]:
    """Return a server for each parameter: the largest first, to the server with the least bytes."""
    loads = [0] * num_servers
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += sizes[index]
    return owners

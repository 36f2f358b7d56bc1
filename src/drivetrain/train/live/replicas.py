"""Replicas: the members of a live run, coordinated by torchft's manager.

Only torchft's lighthouse decides which replicas are in a quorum, so a network partition cannot
split the run in two. A collective that fails raises nothing here: the commit is then refused.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch._C._distributed_c10d import ReduceOp, TCPStore

from drivetrain.core.errors import EnvironmentProblem, Problem
from drivetrain.core.requirements import require
from drivetrain.parallel.world import World

LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"
_LOST_PEER_S = 60.0
"""A peer that is silent without closing its connections is considered lost after this time."""
_BUCKET_BYTES = 25 * 2**20

State = dict[str, Any]


class Replicas:
    """This process's membership, from its first quorum to `leave`."""

    def __init__(
        self,
        world: World,
        step: int,
        patience_s: float,
        give: Callable[[], State],
        take: Callable[[State], None],
    ) -> None:
        """Be ready at `step`; `give` and `take` pass state to a replica that lags behind."""
        if LIGHTHOUSE not in os.environ:
            remedy = "start the run with its supervisor, or start torchft_lighthouse yourself"
            raise EnvironmentProblem([Problem(LIGHTHOUSE, "not set", remedy, has_value=False)])
        # read on import; otherwise it logs four lines per step
        os.environ.setdefault("RUST_LOG", "warn")
        torchft = require("torchft", extra="live")
        # at every quorum it warns about the flight recorder, which only NCCL has
        logging.getLogger("torchft.manager").setLevel(logging.ERROR)
        lost, host = timedelta(seconds=_LOST_PEER_S), socket.gethostname()
        # kept by this object: the process groups rendezvous here when this replica is rank 0
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        group = "ProcessGroupGloo" if world.accelerator.is_cpu else "ProcessGroupNCCL"
        self._manager = torchft.Manager(
            pg=getattr(torchft, group)(timeout=lost),
            state_dict=give,
            load_state_dict=take,
            min_replica_size=1,
            use_async_quorum=False,  # heal before the step, so that all present take part
            timeout=lost,
            quorum_timeout=timedelta(seconds=patience_s),
            quorum_retries=int(patience_s),  # about one per second while a lighthouse is replaced
            rank=0,
            world_size=1,
            store_addr=host,
            store_port=self._store.port,
            replica_id=f"replica_{world.identity.rank:05d}",
        )
        self._manager.load_state_dict({"step": step, "batches_committed": 0})

    def meet(self) -> tuple[int, int, int] | None:
        """Wait for the quorum; return (step, rank, number of replicas), or None if it failed."""
        self._manager.start_quorum()
        if self._manager.errored() is not None:
            return None
        seat, seats = self._manager.participating_rank(), self._manager.num_participants()
        return self._manager.current_step(), seat, seats

    def sum(self, tensors: Sequence[torch.Tensor]) -> None:
        """Sum each tensor over the replicas, in place; all are sent at once."""
        # SUM: the default averages over the replicas, but the loss is already divided
        works = [self._manager.allreduce(each, reduce_op=ReduceOp.SUM) for each in tensors]
        for work in works:
            work.wait()

    def commit(self) -> bool:
        """Return True if the step counts: nothing has failed since the quorum."""
        return bool(self._manager.should_commit())

    def leave(self) -> None:
        """Leave; the others continue without this replica."""
        self._manager.shutdown(wait=False)


def sum_gradients(
    parameters: Sequence[nn.Parameter], numbers: torch.Tensor, replicas: Replicas
) -> torch.Tensor:
    """Sum the gradients, and `numbers` with them; return the sum of `numbers`.

    Every replica sends every gradient, zeros for one it lacks, because another may have it. A
    gradient that no replica has is None afterwards, as on a single process.
    """
    has = [parameter.grad is not None for parameter in parameters]
    small = torch.cat([numbers, torch.tensor(has, dtype=numbers.dtype, device=numbers.device)])
    buckets = _buckets(parameters)
    flat = [torch.cat([_gradient(p).flatten() for p in bucket]) for bucket in buckets]
    replicas.sum([small, *flat])
    for bucket, summed in zip(buckets, flat, strict=True):
        for parameter, part in zip(bucket, summed.split([p.numel() for p in bucket]), strict=True):
            parameter.grad = part.view_as(parameter)
    sums, holders = small[: len(numbers)], small[len(numbers) :]
    for parameter, number in zip(parameters, holders.tolist(), strict=True):
        if not number:
            parameter.grad = None
    return sums


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _buckets(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Group neighbouring parameters of one dtype into buckets large enough to send."""
    buckets: list[list[nn.Parameter]] = []
    size = 0
    for parameter in parameters:
        if not buckets or size > _BUCKET_BYTES or parameter.dtype != buckets[-1][0].dtype:
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += parameter.numel() * parameter.element_size()
    return buckets

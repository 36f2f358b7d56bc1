"""Replicas: those who take part in a live run, kept together by torchft's manager.

torchft's lighthouse decides who is in a quorum; it alone does, so that a network cut in two cannot
leave two runs behind. A collective that fails raises nothing here: the commit is then refused.
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
"""A peer that fell silent without closing its connections is given up after this long."""
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
        """Stand ready at `step`; `give` and `take` pass a replica's state to one that lags."""
        if LIGHTHOUSE not in os.environ:
            remedy = "start the run with its supervisor, or torchft_lighthouse beside it"
            raise EnvironmentProblem([Problem(LIGHTHOUSE, "not set", remedy, has_value=False)])
        os.environ.setdefault("RUST_LOG", "warn")  # read on import; else four lines a step
        torchft = require("torchft", extra="live")
        # it warns at every quorum of a flight recorder that only NCCL has
        logging.getLogger("torchft.manager").setLevel(logging.ERROR)
        lost, host = timedelta(seconds=_LOST_PEER_S), socket.gethostname()
        # held by this object: the others' process groups meet here when this replica sits first
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        group = "ProcessGroupGloo" if world.accelerator.is_cpu else "ProcessGroupNCCL"
        self._manager = torchft.Manager(
            pg=getattr(torchft, group)(timeout=lost),
            state_dict=give,
            load_state_dict=take,
            min_replica_size=1,
            use_async_quorum=False,  # healed before the step, so that whoever is there takes part
            timeout=lost,
            quorum_timeout=timedelta(seconds=patience_s),
            quorum_retries=int(patience_s),  # about one a second while a lighthouse is replaced
            rank=0,
            world_size=1,
            store_addr=host,
            store_port=self._store.port,
            replica_id=f"replica_{world.identity.rank:05d}",
        )
        self._manager.load_state_dict({"step": step, "batches_committed": 0})

    def meet(self) -> tuple[int, int, int] | None:
        """Wait for the quorum: (step, seat, number of seats), or None when it fell apart."""
        self._manager.start_quorum()
        if self._manager.errored() is not None:
            return None
        seat, seats = self._manager.participating_rank(), self._manager.num_participants()
        return self._manager.current_step(), seat, seats

    def sum(self, tensors: Sequence[torch.Tensor]) -> None:
        """Add each up over the replicas, in place; all travel at once."""
        # SUM: the default would divide by the number of replicas, and the batch is divided already
        works = [self._manager.allreduce(each, reduce_op=ReduceOp.SUM) for each in tensors]
        for work in works:
            work.wait()

    def commit(self) -> bool:
        """Whether the step counts: nothing has failed since the quorum."""
        return bool(self._manager.should_commit())

    def leave(self) -> None:
        """The others go on without this one."""
        self._manager.shutdown(wait=False)


def sum_gradients(
    parameters: Sequence[nn.Parameter], numbers: torch.Tensor, replicas: Replicas
) -> torch.Tensor:
    """Complete the gradients, and `numbers` beside them.

    Every replica sends every gradient, zeros where it has none, because another may have one; what
    nobody has is none afterwards, as on a single process. Returns the sum of `numbers`.
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
    """Neighbours of one dtype, in pieces that are worth sending."""
    buckets: list[list[nn.Parameter]] = []
    size = 0
    for parameter in parameters:
        if not buckets or size > _BUCKET_BYTES or parameter.dtype != buckets[-1][0].dtype:
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += parameter.numel() * parameter.element_size()
    return buckets

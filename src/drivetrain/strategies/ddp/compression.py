"""Compressors: how a bucket of gradients is encoded when ranks exchange it."""

# No `from __future__ import annotations` here: DDP checks the annotations of a hook as objects.

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    fp16_compress_hook,
)
from torch.nn.parallel import DistributedDataParallel

from drivetrain.config.schema import Communication
from drivetrain.config.schema import PowerSGD as PowerSGDConfig
from drivetrain.config.schema import TopK as TopKConfig

# Compressor: what happens to a bucket of gradients between backward and the optimizer.
#
# DDP passes each bucket when it is full. The returned future must hold the mean over the ranks, in
# the bucket's own memory. Buckets keep their index from step to step (`ddp._settle_buckets` fixes
# their order before the first step), so residuals of a step can be stored by index.

Mean = torch.futures.Future[torch.Tensor]


class Compressor(Protocol):
    """One way to send a bucket."""

    name: str

    def exchange(self, bucket: GradBucket) -> Mean:
        """Start to average this bucket over the ranks."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state that is carried from step to step."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def take_to(device: torch.device, kept: dict[int, torch.Tensor], index: int) -> None:
    """Move loaded state of a bucket from the CPU to `device` when it is first used."""
    found = kept.get(index)
    if found is not None and found.device != device:
        kept[index] = found.to(device)


def install(compressor: Compressor, wrapped: DistributedDataParallel) -> None:
    """Register `compressor` as the communication hook of `wrapped`."""
    wrapped.register_comm_hook(compressor, _hook)


def _hook(compressor: Compressor, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    return compressor.exchange(bucket)


# Uncompressed gradients, and gradients in 16 bits.


class Plain:
    """Send gradients uncompressed."""

    name = "none"

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def exchange(self, bucket: GradBucket) -> Mean:
        return allreduce_hook(self.group, bucket)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: there is no state."""


class Float16(Plain):
    """Send gradients in fp16: 11 bits of mantissa; values beyond 65,504 become infinite."""

    name = "fp16"

    def exchange(self, bucket: GradBucket) -> Mean:
        return fp16_compress_hook(self.group, bucket)


class BFloat16(Plain):
    """Send gradients in bf16: 8 bits of mantissa, fp32's range. torch's hook is for NCCL only."""

    name = "bf16"

    def exchange(self, bucket: GradBucket) -> Mean:
        buffer = bucket.buffer()
        small = (buffer / self.group.size()).to(torch.bfloat16)

        def widen(sent: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            mean: torch.Tensor = buffer.copy_(sent.value()[0])
            return mean

        work = dist.all_reduce(small, group=self.group, async_op=True)
        future: Mean = work.get_future().then(widen)
        return future


# top-k: a bucket's largest values are sent with their indices; the rest is sent later.
#
# Each rank adds the values it has not sent to its next gradient (error feedback), so they are
# delayed, not lost. Ranks select different indices, so this is an all-gather, whose size grows with
# the number of ranks.

# torch 2.13 renamed this function and warns about the old name
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def largest_places(values: torch.Tensor, ratio: float) -> torch.Tensor:
    """Return the indices of the values with the largest magnitude; at least one."""
    count = max(1, round(ratio * values.numel()))
    return torch.topk(values.abs(), count, sorted=False).indices


class TopKCompressor:
    """Send the largest `ratio` of each bucket."""

    name = "topk"

    def __init__(self, config: TopKConfig, group: dist.ProcessGroup) -> None:
        self._ratio = config.ratio
        self._group = group
        self._kept_back: dict[int, torch.Tensor] = {}

    def exchange(self, bucket: GradBucket) -> Mean:
        """Send values and indices in one message; every rank adds them up in rank order."""
        gradient = bucket.buffer()
        values, places = self._take_largest(gradient, bucket.index())
        message = torch.cat([values.float().view(torch.int32), places.to(torch.int32)])
        num_ranks = self._group.size()
        received = message.new_empty(num_ranks * len(message))

        def add_up(_: torch.futures.Future[Any]) -> torch.Tensor:
            gradient.zero_()
            for numbers, at in received.view(num_ranks, 2, len(places)):
                gradient.index_add_(0, at, numbers.view(torch.float32).to(gradient.dtype))
            mean: torch.Tensor = gradient.div_(num_ranks)
            return mean

        work = _all_gather(received, message, group=self._group, async_op=True)
        future: Mean = work.get_future().then(add_up)
        return future

    def _take_largest(
        self, gradient: torch.Tensor, index: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the values to send, from the gradient plus the residual; keep the rest."""
        take_to(gradient.device, self._kept_back, index)
        kept = self._kept_back.get(index)
        if kept is None or kept.shape != gradient.shape:  # none yet, or from another bucket size
            kept = self._kept_back[index] = torch.zeros_like(gradient)
        kept.add_(gradient)
        places = largest_places(kept, self._ratio)
        values = kept[places]
        kept[places] = 0
        return values, places

    def state_dict(self) -> dict[str, Any]:
        return {"kept_back": dict(self._kept_back)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._kept_back = dict(state["kept_back"])


# PowerSGD by torch: a gradient matrix is sent as two low-rank factors, the error is sent later.

_BY_BUCKET = ("error_dict", "p_memory_dict", "q_memory_dict")


class PowerSGDCompressor:
    """torch's PowerSGD hook, with a state that can be saved without pickle."""

    name = "powersgd"

    def __init__(self, config: PowerSGDConfig, group: dist.ProcessGroup) -> None:
        # imports numpy, so only when it is used
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torchs

        self._exchange = torchs.powerSGD_hook
        self._state = torchs.PowerSGDState(
            group,
            matrix_approximation_rank=config.rank,
            start_powerSGD_iter=config.start_step,
            min_compression_rate=config.min_compression_rate,
            orthogonalization_epsilon=1e-8,  # keeps a column of zeros from becoming NaN
        )

    def exchange(self, bucket: GradBucket) -> Mean:
        """Run torch's hook, without residuals that do not fit the bucket."""
        index, device = bucket.index(), bucket.buffer().device
        for name in _BY_BUCKET:
            take_to(device, getattr(self._state, name), index)
        error = self._state.error_dict.get(index)
        if error is not None and error.shape != bucket.buffer().shape:
            for name in _BY_BUCKET:  # restored from a run with other bucket sizes
                getattr(self._state, name).pop(index, None)
        return self._exchange(self._state, bucket)

    def state_dict(self) -> dict[str, Any]:
        """Return errors, the low-rank factors that each step starts from, step, random state."""
        stream: Any = self._state.rng.get_state()
        name, keys, position, has_gauss, cached = stream
        return {
            **{kept: dict(getattr(self._state, kept)) for kept in _BY_BUCKET},
            "iter": self._state.iter,
            "rng": [name, torch.from_numpy(keys.copy()), position, has_gauss, cached],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for kept in _BY_BUCKET:
            setattr(self._state, kept, dict(state[kept]))
        self._state.iter = state["iter"]
        name, keys, position, has_gauss, cached = state["rng"]
        self._state.rng.set_state((name, keys.numpy(), position, has_gauss, cached))


# Compressors by their config name, and the bytes they send.


def compressor_for(name: str, config: Communication, group: dist.ProcessGroup) -> Compressor:
    """Return the compressor with this name; `auto` is not one, but a choice among them."""
    if name == "topk":
        return TopKCompressor(config.topk, group)
    if name == "powersgd":
        return PowerSGDCompressor(config.powersgd, group)
    return {"none": Plain, "fp16": Float16, "bf16": BFloat16}[name](group)


def ring_bytes(num_bytes: int, num_ranks: int) -> int:
    """Return the bytes that a rank sends in a ring all-reduce of `num_bytes`."""
    return 2 * num_bytes * (num_ranks - 1) // num_ranks


def sent_bytes(config: Communication, gradient_bytes: int, num_ranks: int) -> int:
    """Return the bytes sent per rank and step.

    For PowerSGD, whose traffic depends on the shapes, and for auto, this is an upper bound.
    """
    ring = ring_bytes(gradient_bytes, num_ranks)
    if config.compression in ("fp16", "bf16"):
        return ring // 2
    if config.compression == "topk":  # a value and its index, to every other rank
        return int(2 * config.topk.ratio * gradient_bytes) * (num_ranks - 1)
    return ring

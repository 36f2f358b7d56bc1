"""BatchPlan: which samples make up step k, cut into micro-batches, dealt to ranks.

A step's samples depend on (length, seed, step); its micro-batches on those and the micro-batch
size; who works on which micro-batch on the number of ranks. Only the last of these changes with the
cluster, and it changes no number.

An epoch's last batch may be short. Its samples are then shared out evenly over the same number of
micro-batches, and weighted by their true count; nothing is padded, nothing dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from drivetrain.config.provenance import ResolvedConfig
from drivetrain.core.errors import ConfigError, Problem

_MUCH_IDLE = 0.1
"""Of all turns: less is how batches and ranks happen to divide."""


class MicroBatch(NamedTuple):
    """What one rank takes through the model at once. Without samples it only keeps step."""

    step: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here
    start: int
    """Position of its first sample in the epoch's order."""
    stop: int
    batch_samples: int
    """Samples in the whole global batch."""
    epoch: int

    @property
    def num_samples(self) -> int:
        """Samples in this micro-batch."""
        return self.stop - self.start


class DataPosition(NamedTuple):
    """Where a run stands in its data: after this many steps, so many samples into an epoch."""

    step: int = 0
    epoch: int = 0
    samples: int = 0


_BEGINNING = DataPosition()


@dataclass(frozen=True)
class BatchPlan:
    """Arithmetic of one run's batches. Pure; no data is touched."""

    global_batch_size: int
    micro_batch_size: int
    num_ranks: int
    length: int | None
    """Number of samples; None for a stream."""
    start: DataPosition = _BEGINNING
    """Where these sizes begin to hold: earlier steps of the run may have had larger batches."""

    @cached_property
    def num_micro_batches(self) -> int:
        """Per step, over all ranks."""
        return self.global_batch_size // self.micro_batch_size

    @cached_property
    def accumulation(self) -> int:
        """Micro-batches per rank and step."""
        return -(-self.num_micro_batches // self.num_ranks)

    @cached_property
    def steps_per_epoch(self) -> int | None:
        """None for a stream, which ends when it ends."""
        return None if self.length is None else -(-self.length // self.global_batch_size)

    def position(self, step: int) -> DataPosition:
        """Where the run stands before `step`."""
        began, epoch, samples = self.start
        into, rest = step - began, self._steps_left_at_start
        if into < rest:
            return DataPosition(step, epoch, samples + into * self.global_batch_size)
        epochs, into_epoch = divmod(into - rest, self._known[1])
        return DataPosition(step, epoch + 1 + epochs, into_epoch * self.global_batch_size)

    def is_between_epochs(self, step: int) -> bool:
        """Whether after so many steps no epoch is under way."""
        return self.position(step).samples == 0

    def end_of(self, epoch: int) -> int:
        """The number of steps after which an epoch is over."""
        _, per_epoch = self._known
        return self.start.step + self._steps_left_at_start + (epoch - self.start.epoch) * per_epoch

    def going_on_from(self, position: DataPosition) -> BatchPlan:
        """The same plan, from where batches of another size, or other data, have led to."""
        length, _ = self._known
        if position.samples >= length:
            position = DataPosition(position.step, position.epoch + 1, 0)
        is_own = self.position(position.step) == position
        return self if is_own else replace(self, start=position)

    @cached_property
    def _steps_left_at_start(self) -> int:
        """Of the epoch in which these sizes begin to hold."""
        length, _ = self._known
        return -(-(length - self.start.samples) // self.global_batch_size)

    @cached_property
    def _known(self) -> tuple[int, int]:
        """Samples and steps of an epoch."""
        if self.length is None or self.steps_per_epoch is None:
            raise ValueError("a stream has no steps known in advance")
        return self.length, self.steps_per_epoch

    def block(self, rank: int) -> range:
        """The micro-batch indices that `rank` works on: neighbours, so that sums stay local."""
        start = min(rank * self.accumulation, self.num_micro_batches)
        return range(start, min(start + self.accumulation, self.num_micro_batches))

    def blocks(self) -> list[range]:
        """Every rank's block."""
        return [self.block(rank) for rank in range(self.num_ranks)]

    def micro_batches(self, step: int, rank: int) -> list[MicroBatch]:
        """What `rank` does in `step`: always `accumulation` entries, so that ranks keep step."""
        _, epoch, first = self.position(step)
        batch_samples = min(self.global_batch_size, self._known[0] - first)
        return self.cut(MicroBatch(step, -1, first, first, batch_samples, epoch), rank)

    def cut(self, whole: MicroBatch, rank: int) -> list[MicroBatch]:
        """`rank`'s part of a global batch that starts at `whole.start`.

        A turn without samples stands at the batch's first one; see `stop_of`.
        """
        step, _, first, _, samples, epoch = whole
        shares = self._shares_by_size.get((samples, rank))
        if shares is None:
            shares = self._shares_by_size[samples, rank] = _shares(samples, self, rank)
        return [
            MicroBatch(step, index, first + low, first + high, samples, epoch)
            for index, low, high in shares
        ]

    @cached_property
    def _shares_by_size(self) -> dict[tuple[int, int], list[tuple[int, int, int]]]:
        """By samples and rank: a run has two sizes of batches, full ones and an epoch's last."""
        return {}

    def stop_of(self, micro: MicroBatch) -> int:
        """Where reading stops.

        A rank that must take a turn without samples runs the batch's first ones with weight zero,
        as many as usual, so that no layer meets a size it does not expect.
        """
        if micro.num_samples:
            return micro.stop
        return micro.start + min(self.micro_batch_size, micro.batch_samples)

    @property
    def num_idle_turns(self) -> int:
        """Of all ranks in a step: those without samples."""
        return self.accumulation * self.num_ranks - self.num_micro_batches

    @property
    def idle_warning(self) -> str:
        """Where many turns are idle, how many, and what to change; else empty."""
        turns = self.num_idle_turns + self.num_micro_batches
        if self.num_idle_turns < _MUCH_IDLE * turns:
            return ""
        full = self.micro_batch_size * self.num_ranks
        smaller = self.global_batch_size // self.num_ranks
        fits = 0 < smaller < self.micro_batch_size
        has_too_many = self.num_ranks > self.num_micro_batches
        fewer = f"at most {self.num_micro_batches} data-parallel ranks, " if has_too_many else ""
        return (
            f"{self.num_idle_turns} of {turns} turns a step have no samples: global_batch_size "
            f"{self.global_batch_size} is {self.num_micro_batches} micro-batches of "
            f"{self.micro_batch_size}; use {fewer}"
            f"a global_batch_size of {full} (micro_batch_size {self.micro_batch_size} × "
            f"{self.num_ranks} ranks) or a multiple of it"
            + (f", or micro_batch_size {smaller} or less" if fits else "")
        )

    def __str__(self) -> str:
        idle = self.num_idle_turns
        note = f" ({idle} of {idle + self.num_micro_batches} turns idle)" if idle else ""
        return (
            f"{self.global_batch_size} samples a step = micro-batch {self.micro_batch_size} × "
            f"accumulation {self.accumulation} × {self.num_ranks} "
            f"rank{'s' if self.num_ranks > 1 else ''}{note}"
        )


def share(num_samples: int, num_parts: int, index: int) -> tuple[int, int]:
    """Part `index` of `num_samples` cut into parts whose sizes differ by at most one."""
    size, extra = divmod(num_samples, num_parts)
    start = index * size + min(index, extra)
    return start, start + size + (index < extra)


def _shares(num_samples: int, plan: BatchPlan, rank: int) -> list[tuple[int, int, int]]:
    """(index, start, stop) of each of a rank's turns; start = stop = 0 where there is nothing."""
    shares = []
    for index in plan.block(rank):
        low, high = share(num_samples, plan.num_micro_batches, index)
        shares.append((index, low, high) if low < high else (index, 0, 0))
    return shares + [(-1, 0, 0)] * (plan.accumulation - len(shares))


def solve_micro_batch(resolved: ResolvedConfig, num_ranks: int) -> ResolvedConfig:
    """Choose the micro-batch size when the user left it open, and say why."""
    config = resolved.config
    if config.micro_batch_size != "auto":
        return resolved
    size, rest = divmod(config.global_batch_size, num_ranks)
    if rest:
        near = max(size, 1) * num_ranks
        raise ConfigError(
            [
                Problem(
                    "global_batch_size",
                    f"does not divide into {num_ranks} equal micro-batches",
                    f"use {near} or {near + num_ranks}, or set micro_batch_size",
                    config.global_batch_size,
                )
            ]
        )
    plural = "ranks, one micro-batch each" if num_ranks > 1 else "rank in one micro-batch"
    return resolved.choose(
        "micro_batch_size",
        size,
        f"{config.global_batch_size} samples over {num_ranks} {plural}; "
        "set it to keep dropout the same at another number of ranks",
    )

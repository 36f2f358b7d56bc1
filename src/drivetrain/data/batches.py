"""BatchPlan: which samples make up step k, split into micro-batches, assigned to ranks.

A step's samples depend on (length, seed, step). Its micro-batches also depend on the micro-batch
size, and their assignment to ranks on the number of ranks. Only the assignment changes with the
cluster, and it does not change any result.

An epoch's last batch may be short. Its samples are then split evenly over the same number of
micro-batches and weighted by their true count; nothing is padded or dropped.

A "turn" is one micro-batch slot of a rank in a step. Every rank has the same number of turns, so
some turns may have no samples.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from drivetrain.config.provenance import ResolvedConfig
from drivetrain.config.rules import divisors_near, multiples_near
from drivetrain.core.errors import ConfigError, Problem

_MUCH_IDLE = 0.1
"""Fraction of idle turns that triggers a warning; a smaller one is normal rounding."""


class MicroBatch(NamedTuple):
    """The samples of one forward pass of a rank. One without samples only keeps ranks in step."""

    step: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which is not needed
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
    """A run's position in its data: after `step` steps, `samples` samples into `epoch`."""

    step: int = 0
    epoch: int = 0
    samples: int = 0


_BEGINNING = DataPosition()


@dataclass(frozen=True)
class BatchPlan:
    """The arithmetic of a run's batches. Pure: reads no data."""

    global_batch_size: int
    micro_batch_size: int
    num_ranks: int
    length: int | None
    """Number of samples; None for a stream."""
    start: DataPosition = _BEGINNING
    """From where these sizes apply; earlier steps of the run may have used other sizes."""

    @cached_property
    def num_micro_batches(self) -> int:
        """Micro-batches per step, over all ranks."""
        return self.global_batch_size // self.micro_batch_size

    @cached_property
    def accumulation(self) -> int:
        """Micro-batches per rank and step."""
        return -(-self.num_micro_batches // self.num_ranks)

    @cached_property
    def steps_per_epoch(self) -> int | None:
        """Steps in an epoch; None for a stream, whose length is not known."""
        return None if self.length is None else -(-self.length // self.global_batch_size)

    def position(self, step: int) -> DataPosition:
        """Return the position in the data before `step`."""
        began, epoch, samples = self.start
        into, rest = step - began, self._steps_left_at_start
        if into < rest:
            return DataPosition(step, epoch, samples + into * self.global_batch_size)
        epochs, into_epoch = divmod(into - rest, self._known[1])
        return DataPosition(step, epoch + 1 + epochs, into_epoch * self.global_batch_size)

    def is_between_epochs(self, step: int) -> bool:
        """True if no epoch is in progress after `step` steps."""
        return self.position(step).samples == 0

    def end_of(self, epoch: int) -> int:
        """Return the number of steps after which an epoch ends."""
        _, per_epoch = self._known
        return self.start.step + self._steps_left_at_start + (epoch - self.start.epoch) * per_epoch

    def going_on_from(self, position: DataPosition) -> BatchPlan:
        """Return the same plan, starting at a position reached with other batch sizes or data."""
        length, _ = self._known
        if position.samples >= length:
            position = DataPosition(position.step, position.epoch + 1, 0)
        is_own = self.position(position.step) == position
        return self if is_own else replace(self, start=position)

    @cached_property
    def _steps_left_at_start(self) -> int:
        """Steps left in the epoch in which these sizes start to apply."""
        length, _ = self._known
        return -(-(length - self.start.samples) // self.global_batch_size)

    @cached_property
    def _known(self) -> tuple[int, int]:
        """Samples and steps in an epoch; ValueError for a stream."""
        if self.length is None or self.steps_per_epoch is None:
            raise ValueError("the number of steps of a stream is not known in advance")
        return self.length, self.steps_per_epoch

    def block(self, rank: int) -> range:
        """Return the micro-batch indices of `rank`; contiguous, so that sums stay local."""
        start = min(rank * self.accumulation, self.num_micro_batches)
        return range(start, min(start + self.accumulation, self.num_micro_batches))

    def blocks(self) -> list[range]:
        """Return every rank's block."""
        return [self.block(rank) for rank in range(self.num_ranks)]

    def micro_batches(self, step: int, rank: int) -> list[MicroBatch]:
        """Return the turns of `rank` in `step`: always `accumulation`, to keep ranks in step."""
        _, epoch, first = self.position(step)
        batch_samples = min(self.global_batch_size, self._known[0] - first)
        return self.cut(MicroBatch(step, -1, first, first, batch_samples, epoch), rank)

    def cut(self, whole: MicroBatch, rank: int) -> list[MicroBatch]:
        """Return `rank`'s part of a global batch that starts at `whole.start`.

        A turn without samples has the position of the batch's first sample; see `stop_of`.
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
        """Cache by samples and rank; a run has two batch sizes, full ones and an epoch's last."""
        return {}

    def stop_of(self, micro: MicroBatch) -> int:
        """Return the position at which to stop reading for a turn.

        In a turn without samples, a rank runs the batch's first samples with weight zero, as many
        as usual, so that no layer sees an unexpected size.
        """
        if micro.num_samples:
            return micro.stop
        return micro.start + min(self.micro_batch_size, micro.batch_samples)

    @property
    def num_idle_turns(self) -> int:
        """Turns without samples in a step, over all ranks."""
        return self.accumulation * self.num_ranks - self.num_micro_batches

    @property
    def idle_warning(self) -> str:
        """If many turns are idle, a warning that says how many and what to change; else ""."""
        turns = self.num_idle_turns + self.num_micro_batches
        if not self.has_many_idle_turns:
            return ""
        has_too_many = self.num_ranks > self.num_micro_batches
        fewer = f"at most {self.num_micro_batches} data-parallel ranks, " if has_too_many else ""
        return (
            f"{self.num_idle_turns} of {turns} micro-batch slots per step have no samples: "
            f"global_batch_size {self.global_batch_size} is {self.num_micro_batches} "
            f"micro-batches of {self.micro_batch_size}; use {fewer}{self._full_size}"
            f"{self._smaller_size}"
        )

    @property
    def has_many_idle_turns(self) -> bool:
        """Whether enough turns are idle for a warning."""
        turns = self.num_idle_turns + self.num_micro_batches
        return self.num_idle_turns >= _MUCH_IDLE * turns

    @property
    def _full_size(self) -> str:
        """The warning's words on the next global batch that fills every slot."""
        full = self.micro_batch_size * self.num_ranks
        times = -(-self.global_batch_size // full)
        slots = f"micro_batch_size {self.micro_batch_size} × {self.num_ranks} ranks"
        if times == 1:
            return f"a global_batch_size of {full} ({slots}) or a multiple of it"
        size = f"a global_batch_size of {times * full} ({slots} × accumulation {times})"
        return f"{size} or another multiple of {full}"

    @property
    def _smaller_size(self) -> str:
        """The warning's last words: the largest smaller size that keeps the ranks busy."""
        if self.global_batch_size < self.num_ranks:
            return f"; no micro_batch_size gives each of {self.num_ranks} ranks a sample"
        for size in range(self.micro_batch_size - 1, 0, -1):
            divides = self.global_batch_size % size == 0
            if divides and not replace(self, micro_batch_size=size).has_many_idle_turns:
                return f", or micro_batch_size {size}"
        return ""

    def __str__(self) -> str:
        idle = self.num_idle_turns
        turns = idle + self.num_micro_batches
        note = f" ({idle} of these {turns} micro-batches are empty)" if idle else ""
        return (
            f"{self.global_batch_size} samples a step = micro-batch {self.micro_batch_size} × "
            f"accumulation {self.accumulation} × {self.num_ranks} "
            f"rank{'s' if self.num_ranks > 1 else ''}{note}"
        )


def share(num_samples: int, num_parts: int, index: int) -> tuple[int, int]:
    """Return part `index` of `num_samples`, split into parts whose sizes differ by at most one."""
    size, extra = divmod(num_samples, num_parts)
    start = index * size + min(index, extra)
    return start, start + size + (index < extra)


def _shares(num_samples: int, plan: BatchPlan, rank: int) -> list[tuple[int, int, int]]:
    """Return (index, start, stop) of each of a rank's turns; start = stop = 0 without samples."""
    shares = []
    for index in plan.block(rank):
        low, high = share(num_samples, plan.num_micro_batches, index)
        shares.append((index, low, high) if low < high else (index, 0, 0))
    return shares + [(-1, 0, 0)] * (plan.accumulation - len(shares))


def solve_micro_batch(resolved: ResolvedConfig, num_ranks: int) -> ResolvedConfig:
    """Choose the micro-batch size if it is auto, and record why."""
    config = resolved.config
    if config.micro_batch_size != "auto":
        return resolved
    size, rest = divmod(config.global_batch_size, num_ranks)
    if rest:
        whole = config.global_batch_size
        sizes = divisors_near(whole, size, largest=size + 1)
        remedy = (
            f"use {multiples_near(whole, num_ranks)}, set micro_batch_size to a divisor ({sizes}), "
            "or change the number of ranks"
        )
        rule = f"does not divide into {num_ranks} equal micro-batches"
        raise ConfigError([Problem("global_batch_size", rule, remedy, whole)])
    plural = "ranks, one micro-batch each" if num_ranks > 1 else "rank in one micro-batch"
    return resolved.choose(
        "micro_batch_size",
        size,
        f"{config.global_batch_size} samples over {num_ranks} {plural}; "
        "set it to keep dropout the same at another number of ranks",
    )

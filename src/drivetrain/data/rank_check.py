"""RankCheck: checks that all ranks read the same stream or, if sharded, different parts of it.

In each step, a rank sends the next rank its position and a digest of what it has read. The first
steps of an epoch are checked before training on them, later ones during training, and all of them
before anything is saved.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

from drivetrain.core.errors import ConfigError, Problem
from drivetrain.data.digest import MOST_SHOWN, Mark, Read
from drivetrain.parallel.neighbours import Neighbours
from drivetrain.parallel.world import World

_NUM_FIELDS = 8
_SETTLED_AT_ONCE = 2
"""First steps of an epoch, or of an attempt, that are checked at once."""


@dataclass(frozen=True)
class _Standing:
    """What a rank sends: its data-parallel index, and its position in the stream."""

    dp_index: int
    epoch: int
    mark: Mark
    is_end: bool
    is_known: bool
    shown: tuple[int, ...]

    def numbers(self) -> list[int]:
        rest = [0] * (MOST_SHOWN - len(self.shown))
        ended, known = int(self.is_end), int(self.is_known)
        head = [self.dp_index, self.epoch, *self.mark, ended, known, len(self.shown), 0]
        return [*head, *self.shown, *rest]

    @staticmethod
    def of(numbers: list[int]) -> _Standing:
        dp_index, epoch, position, chain, ended, known, num_shown, _ = numbers[:_NUM_FIELDS]
        shown = tuple(numbers[_NUM_FIELDS:][:num_shown])
        return _Standing(dp_index, epoch, Mark(position, chain), bool(ended), bool(known), shown)

    @property
    def place(self) -> tuple[int, Mark, bool]:
        """The position, which is equal on ranks that read the same samples."""
        return self.epoch, self.mark, self.is_end


@dataclass
class RankCheck:
    """One rank's part of the check."""

    neighbours: Neighbours | None
    rank: int
    dp_index: int
    dataset: Any
    sharding: str
    """The value of data.iterable_sharding."""
    shares_out: bool
    """Whether every data-parallel rank reads its own part."""
    _own: _Standing | None = field(default=None, init=False)
    _num_noted: int = field(default=0, init=False)
    _has_warned: bool = field(default=False, init=False)

    @staticmethod
    def of(world: World, dataset: Any, sharding: str, *, shares_out: bool) -> RankCheck:
        """Create the check of this rank."""
        neighbours = Neighbours.of(world, _NUM_FIELDS + MOST_SHOWN)
        return RankCheck(neighbours, world.rank, world.dp_index, dataset, sharding, shares_out)

    def begin_epoch(self) -> None:
        """Check the next steps at once."""
        self._num_noted = 0

    def note(self, epoch: int, mark: Mark, read: Read) -> None:
        """Record a step. Every rank calls this for every step, and once at an epoch's end."""
        if self.neighbours is None:
            return
        self.settle()
        self._warn_of_unknown(read)
        own = _Standing(self.dp_index, epoch, mark, read.is_end, read.is_known, read.shown)
        self._own = own
        self.neighbours.tell(own.numbers())
        self._num_noted += 1
        if self._num_noted <= _SETTLED_AT_ONCE or read.is_end:
            self.settle()

    def settle(self) -> None:
        """Check the last recorded step against the neighbour's; ConfigError if it is wrong."""
        if self.neighbours is None or self._own is None:
            return
        heard = self.neighbours.hear()
        if heard is None:
            return
        own, other, before = self._own, _Standing.of(heard), self.neighbours.before
        if self.shares_out and own.dp_index != other.dp_index:
            if _are_the_same(own, other) and self._num_noted <= _SETTLED_AT_ONCE:
                raise self._all_read_the_same(before)
        elif own.place != other.place:
            raise self._differ(own, other, before)

    def _warn_of_unknown(self, read: Read) -> None:
        if read.is_known or self._has_warned or self.rank:
            return
        self._has_warned = True
        warnings.warn(
            f"the samples of {_name(self.dataset)} contain objects that cannot be hashed: ranks "
            "are checked only for reading the same number of samples; let the stream yield "
            "tensors, arrays, text and numbers in dicts, lists or tuples",
            stacklevel=2,
        )

    def _all_read_the_same(self, before: int) -> ConfigError:
        rule = (
            f"rank {self.rank} reads the same samples as rank {before}, so each would be used more "
            "than once"
        )
        remedy = "give each rank its own part, or use same_stream"
        return ConfigError([Problem("data.iterable_sharding", rule, remedy, self.sharding)])

    def _differ(self, own: _Standing, other: _Standing, before: int) -> ConfigError:
        who, name = f"rank {self.rank}", _name(self.dataset)
        how = _how_they_differ(own, other, who, f"rank {before}")
        if own.dp_index == other.dp_index and self.shares_out:
            rule = f"{who} and rank {before} work on the same samples (tp, cp or pp), but {how}"
            remedy = "split it by data-parallel rank: ranks of one replica read the same part"
            return ConfigError([Problem("data", rule, remedy, name)])
        rule = f"every rank must read the same stream, but {how}"
        return ConfigError([Problem("data", rule, remedy_for(self.dataset), name)])


def remedy_for(dataset: Any) -> str:
    """Return what to do about a stream that is not the same each time it is read."""
    splitter = splits_by(dataset)
    if splitter:
        return (
            f"it was split by {splitter}: pass it unsplit, or set "
            "data.iterable_sharding=already_sharded"
        )
    return (
        "seed its shuffling the same way on every rank (by set_epoch(epoch), or from torch's, "
        "Python's and NumPy's global generators, which follow the run's seed); if it gives each "
        "rank its own part, set data.iterable_sharding=already_sharded"
    )


def _are_the_same(own: _Standing, other: _Standing) -> bool:
    """True if both ranks read the same samples; identical samples throughout prove nothing."""
    is_told = own.is_known and other.is_known and len(set(own.shown)) > 1
    return is_told and own.place == other.place


def _how_they_differ(own: _Standing, other: _Standing, who: str, whom: str) -> str:
    here, there = set(own.shown), set(other.shown)
    if own.is_end != other.is_end:
        ended, goes_on = (who, whom) if own.is_end else (whom, who)
        position = (own if own.is_end else other).mark.position
        return f"{ended}'s ended after {position} samples and {goes_on}'s continues"
    if own.epoch != other.epoch or own.mark.position != other.mark.position:
        return (
            f"{who} has read {own.mark.position} samples of epoch {own.epoch} and {whom} "
            f"{other.mark.position} of epoch {other.epoch}"
        )
    if here & there:
        return f"{who} reads the samples of {whom} in a different order"
    return (
        f"{who} reads different samples than {whom}: the dataset gives each rank its own part, or "
        "shuffles with its own random numbers"
    )


def splits_by(dataset: Any) -> str:
    """Return what split a well-known library's dataset among ranks; "" if nothing is found."""
    if getattr(dataset, "_distributed", None) is not None:  # Hugging Face's
        return "split_dataset_by_node"
    stages = getattr(dataset, "pipeline", None)  # WebDataset's
    names = [getattr(stage, "__name__", "") for stage in stages] if isinstance(stages, list) else []
    return "split_by_node" if "split_by_node" in names else ""


def _name(dataset: Any) -> str:
    return type(dataset).__name__

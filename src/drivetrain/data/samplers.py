"""The user's samplers, iterated with random streams keyed by (seed, epoch).

What a sampler draws from torch's, Python's or NumPy's global generators is then the same on any
number of ranks and in a resumed run. A sampler that draws from another source is detected by
iterating it twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from drivetrain.core.errors import ConfigError, Problem, blame
from drivetrain.data.digest import chained, digest_of
from drivetrain.data.keys import SAMPLER, fold
from drivetrain.data.seeding import seed_data, undisturbed


@dataclass(frozen=True)
class Drawn:
    """An epoch's ids in order, or its batches of ids."""

    epoch: int
    items: Sequence[Any]
    digest: int
    num_ids: int


@dataclass(frozen=True)
class UserSampler:
    """A sampler, or a batch sampler whose batches are micro-batches."""

    sampler: Any
    yields_batches: bool
    length: int
    """Number of ids, or of batches, in an epoch."""

    @staticmethod
    def of(sampler: Any, *, yields_batches: bool) -> UserSampler:
        """Wrap a sampler; ConfigError if it has no length."""
        try:
            length = len(sampler)
        except (TypeError, NotImplementedError):
            length = 0
        if length < 1:
            what = "batches" if yields_batches else "ids"
            rule = "does not say how long an epoch is"
            remedy = f"give it a __len__: the number of {what} it yields"
            raise ConfigError([Problem("DataLoader sampler", rule, remedy, _name(sampler))])
        return UserSampler(sampler, yields_batches, length)

    def draw(self, seed: int, epoch: int) -> Drawn:
        """Return an epoch's ids. Does not change the process's random streams."""
        with undisturbed():
            inner: Any = getattr(self.sampler, "sampler", None)
            for each in (self.sampler, inner):
                if hasattr(each, "set_epoch"):
                    each.set_epoch(epoch)
            seed_data(fold(seed, SAMPLER, epoch))
            try:
                items = [self._plain(item) for item in self.sampler]
            except Exception as error:
                blame(error, f"{_name(self.sampler)}.__iter__ (sampler), in epoch {epoch},")
                raise
        if len(items) != self.length:
            what = "batches" if self.yields_batches else "ids"
            rule = f"yields {len(items)} {what} in epoch {epoch}, but its len() is {self.length}"
            raise self.refusal(rule, "make len() equal what it yields, in every epoch")
        num_ids = sum(map(len, items)) if self.yields_batches else len(items)
        return Drawn(epoch, items, _digest(items), num_ids)

    def check_repeatable(self, seed: int) -> Drawn:
        """Return the first epoch's ids; ConfigError if drawing them again gives different ids."""
        first, again = self.draw(seed, 0), self.draw(seed, 0)
        if first.digest != again.digest:
            rule = (
                "draws random numbers that do not follow the run's seed: drawn twice, an epoch has "
                "different ids, so other ranks and a resumed run cannot reproduce them"
            )
            remedy = (
                "leave out its generator=, or draw from torch's, Python's or NumPy's global "
                "generators, or from one that is seeded in __iter__ by set_epoch(epoch)"
            )
            raise self.refusal(rule, remedy)
        return first

    def refusal(self, rule: str, remedy: str) -> ConfigError:
        """Return an error about this sampler."""
        return ConfigError([Problem("DataLoader sampler", rule, remedy, _name(self.sampler))])

    def largest(self, drawn: Drawn) -> int:
        """Return the size of the largest batch in an epoch."""
        return max(map(len, drawn.items))

    def _plain(self, item: Any) -> Any:
        return [_id(each) for each in item] if self.yields_batches else _id(item)


def _id(item: Any) -> Any:
    """Convert a one-element tensor to a number; pass any other id to the dataset unchanged."""
    return int(item) if hasattr(item, "__index__") else item


def _digest(items: Sequence[Any]) -> int:
    number, is_known = digest_of(list(items))
    return number if is_known else chained(0, len(items))


def _name(sampler: Any) -> str:
    return type(sampler).__name__

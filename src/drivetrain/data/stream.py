"""StreamFeed: samples that can only be read in order.

`same_stream`: every rank reads the whole stream, splits it into global batches and keeps its own
micro-batches, so results equal those of one process. With shards (`own_shard`: from the dataset's
`shard()`; `already_sharded`: the dataset itself is sharded), a rank reads only its own part. Ranks
agree on each step's true size, and a rank whose part has ended continues with weight zero until all
parts have ended.

A chain of digests (`digest.py`) records what is read. Ranks compare it at every step
(`rank_check.py`), loader processes compare theirs, and a resumed run compares it with what was
saved.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from drivetrain.core.errors import ConfigError, Problem
from drivetrain.data.batches import BatchPlan, MicroBatch
from drivetrain.data.digest import Mark, Read, chained
from drivetrain.data.feed import Turn
from drivetrain.data.rank_check import RankCheck, remedy_for
from drivetrain.data.seeding import undisturbed
from drivetrain.data.sources import Source
from drivetrain.data.stream_readers import Piece, Place, ShardReader, WholeReader
from drivetrain.data.stream_shards import Shards


class StreamFeed:
    """A rank's share of a stream."""

    def __init__(
        self,
        source: Source,
        plan: BatchPlan,
        rank: int,
        seed: int,
        shards: Shards | None = None,
        check: RankCheck | None = None,
    ) -> None:
        self.plan = plan
        self._source = source
        self._rank = rank
        self._seed = seed
        self._shards = shards
        self._check = check
        self._epoch_now, self._step, self._epoch_began_at = 0, 0, 0
        self._used = 0
        """Samples of the epoch before `_epoch_began_at`, in batches of another size."""
        self._mark = Mark()
        """What the steps so far have used of the epoch."""
        self._saved_mark: Mark | None = None
        """The checkpoint's mark, until the stream has been read up to it."""
        self._is_over = False
        self._total_steps: int | None = None
        self._reading: _Reading | None = None
        self._own: dict[str, Any] | None = None
        self._has_new_size = False
        self.accepts_other_data = False
        """Whether a stream that is read again may differ from before."""

    # Saving

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the epoch; after a short batch, the start of the next epoch."""
        if self._check is not None:
            self._check.settle()
        mark = Mark() if self._is_over else self._mark
        return {
            "step": self._step,
            "epoch": self._epoch_now + self._is_over,
            "epoch_began_at": self._step if self._is_over else self._epoch_began_at,
            "used": 0 if self._is_over else self._used,
            "global_batch_size": self.plan.global_batch_size,
            "num_shards": self._num_shards,
            "num_workers": self._source.num_workers if self._shards else None,
            "seed": self._seed,
            "read": None if self._shards else list(mark),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make steps() resume at a saved position."""
        self._refuse_other_shards(state)
        # the user accepted a different seed: what is drawn from it differs
        self.accepts_other_data |= state.get("seed", self._seed) != self._seed
        self._step, self._epoch_now = state["step"], state["epoch"]
        self._epoch_began_at, self._used = state["epoch_began_at"], state.get("used", 0)
        if state.get("read") is not None:
            self._mark = self._saved_mark = Mark(*state["read"])
        size = state.get("global_batch_size", self.plan.global_batch_size)
        if size != self.plan.global_batch_size:
            self._go_on_with_another_size(size)

    @property
    def own_state(self) -> dict[str, Any]:
        """What only this rank knows: its chain, and the dataset's own `state_dict`.

        A `state_dict` may be incomplete (it rarely contains a shuffle buffer), so the next batch is
        read ahead and its digest saved: a resumed run can then check that the state leads to it.
        """
        dataset, state, whole = self._source.dataset, None, 0
        if self._can_have_state and self._reading is not None and not self._is_over:
            state = copy.deepcopy(dataset.state_dict())
            if self._step != self._total_steps:  # what is read ahead would be lost
                whole = self._reading.look_ahead()
        return {"dataset": state, "next": whole, "mark": list(self._mark)}

    @own_state.setter
    def own_state(self, state: dict[str, Any]) -> None:
        self._own = state
        if self._shards:
            self._mark = self._saved_mark = Mark(*state["mark"])

    @property
    def _can_have_state(self) -> bool:
        """False if loader processes prefetch, or for a shard that is created from the dataset."""
        is_read_itself = self._shards is None or self._shards.are_given
        has_state = hasattr(self._source.dataset, "load_state_dict")
        return is_read_itself and not self._source.num_workers and has_state

    @property
    def _num_shards(self) -> int | None:
        return self.plan.num_ranks if self._shards else None

    def _refuse_other_shards(self, state: dict[str, Any]) -> None:
        before, now = state["num_shards"], self._num_shards
        if before != now:
            was, then = (f"{n} shards" if n else "the whole stream" for n in (before, now))
            raise ConfigError(
                [
                    Problem(
                        "data.iterable_sharding",
                        f"the run was saved reading {was}, and would resume reading {then}",
                        "use as many ranks as before, or same_stream from the start",
                        self._shards.name if self._shards else None,
                        has_value=self._shards is not None,
                    )
                ]
            )
        workers, num_workers = state.get("num_workers"), self._source.num_workers
        if workers is not None and workers != num_workers and max(workers, num_workers) > 1:
            rule = f"was {workers}; loader processes split a shard, so its order depends on them"
            remedy = f"use {workers}, as before"
            raise ConfigError([Problem("data.num_workers", rule, remedy, num_workers)])

    def _go_on_with_another_size(self, before: int) -> None:
        """Keep counting in samples: batches of the new size start where the old ones ended."""
        if self._shards or self._source.is_batched:
            raise ConfigError(
                [
                    Problem(
                        "global_batch_size",
                        f"was {before}; the position in a stream's shards or ready batches is "
                        "counted in batches",
                        "keep it, or use data.iterable_sharding=same_stream from the start",
                        self.plan.global_batch_size,
                    )
                ]
            )
        self._has_new_size = True
        self._used += (self._step - self._epoch_began_at) * before
        self._epoch_began_at = self._step

    def sample_ids(self, step: int) -> list[int]:  # noqa: ARG002
        """A stream's samples have no ids."""
        return []

    # Reading

    def steps(self, total_steps: int | None, num_epochs: int | None) -> Iterator[Iterator[Turn]]:
        """Yield the turns of each step, over all epochs, until the steps or the epochs end."""
        # without a number of steps, the epochs end the run; with one, epochs repeat as needed
        limit = num_epochs if total_steps is None else None
        self._total_steps = total_steps
        for epoch in itertools.count(self._epoch_now):
            if epoch == limit or self._step == total_steps:
                return
            if epoch > self._epoch_now:
                self._epoch_now, self._epoch_began_at, self._used = epoch, self._step, 0
                self._mark, self._is_over = Mark(), False
            yield from self._rest_of_epoch()
            if self._step == self._epoch_began_at and not self._used:
                raise ConfigError(
                    [
                        Problem(
                            "data",
                            f"the stream has no samples in epoch {epoch}",
                            "give it at least one, or pass a dataset that can be read again",
                            has_value=False,
                        )
                    ]
                )

    def _rest_of_epoch(self) -> Iterator[Iterator[Turn]]:
        reading = self._reading = self._open()
        if self._check is not None:
            self._check.begin_epoch()
        last: list[Turn] = []
        while self._step != self._total_steps:  # checked first: what is read ahead would be lost
            turns = reading.next_step()
            self._mark = reading.mark
            if self._check is not None:
                self._check.note(self._epoch_now, reading.mark, reading.last)
            if self._shards:
                turns = self._agreed(turns, last, self._shards)
            if not turns:
                break
            last = turns
            self._step += 1
            self._is_over = not self._shards and reading.is_short
            yield iter(turns)
        if self._check is not None:
            self._check.settle()
        self._reading = None

    def _open(self) -> _Reading:
        """Open the stream at the run's position, by the dataset's state or by rereading."""
        own, self._own = self._own, None
        saved, self._saved_mark = self._saved_mark, None
        if self.accepts_other_data:
            saved = None
        if own and own["dataset"] is not None and own["next"] and not self._has_new_size:
            reading = self._by_state(own, Mark(*own["mark"]))
            if reading is not None:
                return reading
        done = self._step - self._epoch_began_at
        if self._shards:  # only the loader knows which loader process made which batch
            reading = self._read_from(self._epoch_began_at, 0, Mark())
            for _ in range(done):
                reading.next_step()
            if saved is not None:
                check_replay(self._source.dataset, saved, reading.mark)
            return reading
        reading = self._read_from(self._epoch_began_at, done, saved if done or self._used else None)
        self._mark = saved or Mark()
        return reading

    def _by_state(self, own: dict[str, Any], mark: Mark) -> _Reading | None:
        """Open by the dataset's state; None if it does not lead to the batch that came next."""
        dataset = self._source.dataset
        beginning = copy.deepcopy(dataset.state_dict())
        dataset.load_state_dict(own["dataset"])
        reading = self._read_from(self._step, 0, mark, is_there=True)
        if reading.look_ahead() == own["next"]:
            return reading
        warnings.warn(
            f"the state_dict of {type(dataset).__name__} does not restore the position at which "
            "the run was saved (a shuffle buffer loses its contents): the stream is read again up "
            "to there",
            stacklevel=2,
        )
        dataset.load_state_dict(beginning)
        return None

    def _read_from(
        self, began: int, skipped: int, mark: Mark | None, *, is_there: bool = False
    ) -> _Reading:
        """Read what comes after `skipped` steps, which must lead to `mark`.

        `is_there`: the dataset is already at the mark.
        """
        used, begins_at = (0, mark or Mark()) if is_there else (self._used, Mark())
        place = Place(self._epoch_now, began, used, skipped, begins_at)
        reader: WholeReader
        if self._shards is None:
            reader = WholeReader(self._source, self.plan, self._rank, self._seed, place)
        else:
            reader = ShardReader(
                self._source, self.plan, self._rank, self._seed, place, self._shards.name
            )
        return _Reading(reader, self._source, self.plan, mark)

    def _agreed(self, turns: list[Turn], last: list[Turn], shards: Shards) -> list[Turn]:
        """Agree on a sharded step's size over all ranks; no turns if all parts have ended."""
        total = shards.sum_over_ranks(sum(micro.num_samples for micro, _ in turns))
        if total == 0:
            return []
        if not turns and not last:
            raise ConfigError(
                [
                    Problem(
                        "data.iterable_sharding",
                        f"rank {self._rank}'s shard of the stream is empty",
                        "use same_stream, or fewer ranks",
                        shards.name,
                    )
                ]
            )
        micro, batch = (turns or last)[-1]
        idle = [(micro._replace(start=0, stop=0), batch)] * (self.plan.accumulation - len(turns))
        first, epoch = self.plan.block(self._rank).start, self._epoch_now
        return [
            (MicroBatch(self._step, first + index, micro.start, micro.stop, total, epoch), batch)
            for index, (micro, batch) in enumerate([*turns, *idle])
        ]


class _Reading:
    """Reads an epoch from a position, step by step; checks that each batch follows the last."""

    def __init__(
        self, reader: WholeReader, source: Source, plan: BatchPlan, mark: Mark | None
    ) -> None:
        """Start reading. `mark` is where the first batch must start; None: anywhere."""
        loader: DataLoader[Any] = DataLoader(
            reader, batch_size=None, collate_fn=_as_is, **source.loader_options
        )
        self.mark = mark or Mark()
        """What the steps returned so far have used."""
        self.last = Read(self.mark, self.mark)
        self._reader = reader
        self._dataset = source.dataset
        self._accumulation = plan.accumulation
        self._pieces: Iterator[Piece | ConfigError] = iter(loader)
        self._start = mark
        self._seen: dict[int | None, Read] = {}
        """The latest read, by loader process if each reads its own part."""
        self._ahead: list[Piece] | Exception | None = None

    @property
    def is_short(self) -> bool:
        """True if the last step ended the epoch."""
        before, after = self.last.before, self.last.after
        return after.position - before.position < self._reader.num_items

    def next_step(self) -> list[Turn]:
        """Return a step's turns; none at the end."""
        ahead, self._ahead = self._ahead, None
        if isinstance(ahead, Exception):
            raise ahead
        pieces = self._take() if ahead is None else ahead
        for piece in pieces:
            self._use(piece.read)
        if not pieces:
            self.last = Read(self.mark, self.mark)
        return [(piece.micro, piece.batch) for piece in pieces]

    def look_ahead(self) -> int:
        """Read the next step ahead, keep it, and return a digest of its first batch."""
        if self._ahead is None:
            self._reader.hashes_next = True
            try:
                with undisturbed():
                    self._ahead = self._take()
            except Exception as error:
                self._ahead = error
        if isinstance(self._ahead, Exception):
            return 0
        return self._ahead[0].read.whole if self._ahead else 1

    def _use(self, read: Read) -> None:
        if read == self.last:
            return  # another turn of the same batch
        self.last = read
        if read.worker is None:
            self.mark = read.after
        else:
            position = self.mark.position + read.after.position - read.before.position
            self.mark = Mark(position, chained(self.mark.chain, read.after.chain))

    def _take(self) -> list[Piece]:
        """Return a step's pieces. The end of the stream is a piece too, from each process."""
        pieces: list[Piece] = []
        for piece in self._pieces:
            if isinstance(piece, ConfigError):
                raise piece
            self._check(piece.read)
            if not piece.read.is_end:
                pieces.append(piece)
            if len(pieces) == self._accumulation:
                break
        return pieces

    def _check(self, read: Read) -> None:
        """ConfigError if loader processes read different streams."""
        before = self._seen.get(read.worker)
        self._seen[read.worker] = read
        if before is None:
            if self._start is not None and read.worker is None:
                check_replay(self._dataset, self._start, read.before)
        elif read.before != before.after and read != before:
            rule = "its loader processes read different samples, or in a different order"
            remedy = (
                "seed its shuffling the same way in every process (set_epoch(epoch), or torch's, "
                "Python's and NumPy's global generators, which follow the run's seed), or use "
                "data.num_workers=0"
            )
            raise ConfigError([Problem("data", rule, remedy, type(self._dataset).__name__)])


def check_replay(dataset: Any, saved: Mark, found: Mark) -> None:
    """ConfigError unless a stream that is read again repeats what it gave before."""
    if found == saved:
        return
    rule = "does not repeat the samples that it gave before the run was saved"
    if found.position != saved.position:
        rule = (
            f"has {found.position} samples, but the run had used {saved.position} when it was saved"
        )
    remedy = (
        "resume with the same data, or add --accept-change data.content before the script; "
        f"{remedy_for(dataset)}"
    )
    raise ConfigError([Problem("data", rule, remedy, type(dataset).__name__)])


def _as_is(item: Any) -> Any:
    return item

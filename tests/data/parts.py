"""What the tests of data share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset, default_collate, default_convert

from drivetrain.data.digest import Mark, Read, add
from drivetrain.data.rank_check import _Standing
from drivetrain.data.sources import Source


class Recorder:
    """What a digest is given."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []

    def update(self, part: Any) -> None:
        self.parts.append(bytes(part))


def given(sample: Any) -> tuple[list[bytes], bool]:
    recorder = Recorder()
    is_known = add(recorder, sample)
    return recorder.parts, is_known


class Numbers:
    """A dataset of its own indices; notes what is asked for."""

    def __init__(self, length: int = 20) -> None:
        self.length = length
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.asked.append(index)
        return index


def source(length: int = 20, **more: Any) -> Source:
    return Source(Numbers(length), length, shuffle=False, **more)


class Stream(IterableDataset[Any]):
    """Numbers up to a length."""

    def __init__(self, length: int, size: int = 0) -> None:
        self.length, self.size = length, size

    def __iter__(self) -> Iterator[Any]:
        for n in range(self.length):
            yield torch.full((self.size,), n) if self.size else torch.tensor(n)


def stream_source(length: int, size: int = 0, **more: Any) -> Source:
    collate = default_convert if size else default_collate
    return Source(
        Stream(length, size), None, shuffle=False, is_batched=bool(size), collate=collate, **more
    )


class Noted:
    """In place of a check with other ranks."""

    def __init__(self) -> None:
        self.notes: list[Any] = []

    def begin_epoch(self) -> None:
        self.notes.append("begins")

    def note(self, epoch: int, mark: Mark, read: Read) -> None:
        self.notes.append((epoch, mark.position, read.is_end, mark == read.after))

    def settle(self) -> None:
        self.notes.append("settled")


class Order:
    """The ids it is given; notes the epochs it is told of."""

    def __init__(self, *ids: Any, length: int | None = None) -> None:
        self.ids, self.length = list(ids), length
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __len__(self) -> int:
        return len(self.ids) if self.length is None else self.length

    def __iter__(self) -> Iterator[Any]:
        return iter(self.ids)


class Ring:
    """Neighbours that say what they are given to say."""

    before = 0

    def __init__(self, *answers: _Standing) -> None:
        self.answers = list(answers)
        self.told: list[list[int]] = []
        self.num_heard = 0

    def tell(self, numbers: list[int]) -> None:
        self.told.append(numbers)

    def hear(self) -> list[int] | None:
        if self.num_heard == len(self.told):
            return None
        self.num_heard += 1
        return self.answers.pop(0).numbers() if self.answers else self.told[-1]

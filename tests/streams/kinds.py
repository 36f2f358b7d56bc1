"""Streams of every kind, each of which yields its sample's number, so that uses can be counted."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

NUM_SAMPLES, NUM_SHARDS = 52, 6
Sample = torch.Tensor


def _rank_and_size() -> tuple[int, int]:
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class Numbers(IterableDataset[Sample]):
    """In order; knows neither ranks nor loader processes."""

    def __iter__(self) -> Iterator[Sample]:
        return (torch.tensor(number) for number in range(NUM_SAMPLES))


class Shuffled(IterableDataset[Sample]):
    """Another order each epoch, from a seed and the epoch, as it should be."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Sample]:
        numbers = list(range(NUM_SAMPLES))
        random.Random(self.epoch).shuffle(numbers)  # noqa: S311
        return (torch.tensor(number) for number in numbers)


class BufferShuffled(IterableDataset[Sample]):
    """A shuffle buffer that draws from Python's own generator."""

    def __iter__(self) -> Iterator[Sample]:
        buffer: list[int] = []
        for number in range(NUM_SAMPLES):
            buffer.append(number)
            if len(buffer) == 8:
                yield torch.tensor(buffer.pop(random.randrange(8)))  # noqa: S311
        random.shuffle(buffer)
        yield from map(torch.tensor, buffer)


class OwnRandomOrder(IterableDataset[Sample]):
    """Shuffles with a generator that nobody seeds."""

    def __iter__(self) -> Iterator[Sample]:
        numbers = list(range(NUM_SAMPLES))
        random.Random().shuffle(numbers)  # noqa: S311
        return (torch.tensor(number) for number in numbers)


class SplitsItself(IterableDataset[Sample]):
    """Gives each rank, and each loader process, a part of its own."""

    def __iter__(self) -> Iterator[Sample]:
        rank, size = _rank_and_size()
        worker = get_worker_info()
        part, parts = (worker.id, worker.num_workers) if worker else (0, 1)
        numbers = range(rank * parts + part, NUM_SAMPLES, size * parts)
        return (torch.tensor(number) for number in numbers)


class SplitsByRank(IterableDataset[Sample]):
    """Gives each rank a part of its own, and does not know of loader processes."""

    def __iter__(self) -> Iterator[Sample]:
        rank, size = _rank_and_size()
        return (torch.tensor(number) for number in range(rank, NUM_SAMPLES, size))


class ReadyBatches(IterableDataset[Sample]):
    """Batches of two."""

    def __iter__(self) -> Iterator[Sample]:
        return iter(torch.arange(NUM_SAMPLES).split(2))


class ShardFolder(IterableDataset[Sample]):
    """As MosaicML's streams: a folder of shards with an index, an order drawn from a seed and the
    epoch, and a state that says where it stands."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.epoch, self.used = folder, 0, 0

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch, self.used = epoch, 0

    def __iter__(self) -> Iterator[Sample]:
        numbers: list[int] = []
        for name in json.loads((self.folder / "index.json").read_text())["shards"]:
            numbers += np.load(self.folder / name).tolist()
        random.Random(f"{7 + self.epoch}").shuffle(numbers)  # noqa: S311
        while self.used < len(numbers):
            self.used += 1
            yield torch.tensor(numbers[self.used - 1])
        self.used = 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "used": self.used}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.used = state["epoch"], state["used"]


def _cuts() -> list[list[int]]:
    return [part.tolist() for part in torch.arange(NUM_SAMPLES).tensor_split(NUM_SHARDS)]


def make_files(folder: Path) -> None:
    """Shards on the disk, once for all runs."""
    folder.mkdir(parents=True)
    names = []
    for index, numbers in enumerate(_cuts()):
        names.append(f"{index}.npy")
        np.save(folder / names[-1], np.array(numbers))
    (folder / "index.json").write_text(json.dumps({"shards": names}))


def make_tar_files(folder: Path) -> None:
    """The same as WebDataset's shards."""
    import webdataset

    for index, numbers in enumerate(_cuts()):
        with webdataset.TarWriter(str(folder / f"{index}.tar")) as tar:
            for number in numbers:
                tar.write({"__key__": f"{number:04d}", "id": str(number).encode()})


def _hugging_face(*, shuffled: bool = False, split: bool = False) -> Any:
    from datasets import Dataset
    from datasets.distributed import split_dataset_by_node

    table = Dataset.from_dict({"id": list(range(NUM_SAMPLES))})
    stream = table.to_iterable_dataset(num_shards=NUM_SHARDS)
    if shuffled:
        stream = stream.shuffle(seed=3, buffer_size=10)
    if split:
        rank, size = _rank_and_size()
        stream = split_dataset_by_node(stream, rank=rank, world_size=size)
    return stream


def _number(sample: dict[str, Any]) -> Sample:
    return torch.tensor(int(sample["id"]))


def _web_dataset(folder: Path, **options: Any) -> Any:
    import webdataset

    urls = [str(folder / f"{index}.tar") for index in range(NUM_SHARDS)]
    stream = webdataset.WebDataset(urls, empty_check=False, **{"shardshuffle": False, **options})
    return stream.map(_number)


def _everything(urls: Any) -> Any:
    yield from urls


def _split_by_node(folder: Path) -> Any:
    import webdataset

    return _web_dataset(folder, nodesplitter=webdataset.split_by_node)


def _stateful_loader(folder: Path) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(ShardFolder(folder), batch_size=2)


@dataclass(frozen=True)
class Kind:
    """A stream, and how it is declared."""

    name: str
    make: Callable[[Path], Any]
    data: dict[str, Any] = field(default_factory=dict)


SHARDED = {"iterable_sharding": "already_sharded"}
KINDS = [
    Kind("own IterableDataset", lambda _: Numbers()),
    Kind("own, shuffled by `set_epoch`", lambda _: Shuffled()),
    Kind("own, shuffle buffer on `random`", lambda _: BufferShuffled()),
    Kind("ready batches (`data.batched`)", lambda _: ReadyBatches(), {"batched": True}),
    Kind(
        "ready batches, `DataLoader(batch_size=None)`", lambda _: DataLoader(ReadyBatches(), None)
    ),
    Kind("Mosaic-like shards, with a state", ShardFolder),
    Kind("torchdata `StatefulDataLoader`", _stateful_loader),
    Kind("Hugging Face, streaming", lambda _: _hugging_face()),
    Kind("Hugging Face, `shuffle(buffer_size)`", lambda _: _hugging_face(shuffled=True)),
    Kind(
        "Hugging Face, `own_shard`", lambda _: _hugging_face(), {"iterable_sharding": "own_shard"}
    ),
    Kind("WebDataset", lambda folder: _web_dataset(folder, nodesplitter=_everything)),
    Kind(
        "Hugging Face, `split_dataset_by_node`, declared",
        lambda _: _hugging_face(split=True),
        SHARDED,
    ),
    Kind("WebDataset, `split_by_node`, declared", _split_by_node, SHARDED),
    Kind("splits itself by rank and loader process, declared", lambda _: SplitsItself(), SHARDED),
    Kind("splits itself by rank, declared", lambda _: SplitsByRank(), SHARDED),
    Kind(
        "Hugging Face, `split_dataset_by_node`",
        lambda _: _hugging_face(split=True),
    ),
    Kind("WebDataset, `split_by_node`", _split_by_node),
    Kind("splits itself by rank", lambda _: SplitsByRank()),
    Kind("not split, but declared", lambda _: Numbers(), SHARDED),
    Kind(
        "own random order, unseeded",
        lambda _: OwnRandomOrder(),
    ),
]

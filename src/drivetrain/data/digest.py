"""Digests of samples: what a rank has read, in a few bytes that can be compared and saved.

`ReadDigest` follows a stream. Its chain is a function of the samples and their positions alone:
ranks that have read the same have the same chain, whatever their batches; so has a run that reads
the stream again after an interruption.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any, NamedTuple

import torch

_ALL_OF_FIRST = 256
_EVERY = 64
"""After the first samples of an epoch only every so many is hashed: reading must stay cheap."""
_HASHED_BYTES = 1 << 16
"""Of a larger tensor or array, elements at even distances are hashed."""
MOST_SHOWN = 8
_WORD = (1 << 63) - 1


def add(digest: Any, sample: Any) -> bool:
    """Whatever a sample is made of; False where something in it could only be told by its type."""
    digest.update(type(sample).__name__.encode())
    if isinstance(sample, torch.Tensor):
        return _add_tensor(digest, sample)
    if isinstance(sample, Mapping):
        return _add_all(digest, itertools.chain.from_iterable(sample.items()))
    if isinstance(sample, (list, tuple)):
        return _add_all(digest, sample)
    if isinstance(sample, (bytes, bytearray)):
        digest.update(sample)
    elif isinstance(sample, (str, int, float, complex, bool)):
        digest.update(repr(sample).encode())
    elif hasattr(sample, "tobytes"):  # NumPy's arrays, PIL's images
        digest.update(str((getattr(sample, "shape", None), getattr(sample, "size", None))).encode())
        digest.update(sample.tobytes())
    else:
        return sample is None
    return True


def _add_all(digest: Any, parts: Iterable[Any]) -> bool:
    are_known = [add(digest, part) for part in parts]
    return all(are_known)


def _add_tensor(digest: Any, tensor: torch.Tensor) -> bool:
    digest.update(str((tensor.dtype, tuple(tensor.shape))).encode())
    if tensor.layout is not torch.strided:
        return False
    digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return True


def _lighter(sample: Any) -> Any:
    """The same sample, of which a digest is cheap: a few elements of what is large."""
    if isinstance(sample, torch.Tensor) and sample.layout is torch.strided:
        size = sample.numel() * sample.element_size()
        step = -(-size // _HASHED_BYTES)
        return sample if step <= 1 else (sample.shape, sample.detach().reshape(-1)[::step])
    if isinstance(sample, bytes) and len(sample) > _HASHED_BYTES:
        return [len(sample), sample[: _HASHED_BYTES // 2], sample[-_HASHED_BYTES // 2 :]]
    if isinstance(sample, Mapping):
        return {key: _lighter(value) for key, value in sample.items()}
    if isinstance(sample, (list, tuple, Set)):
        parts = sorted(sample, key=repr) if isinstance(sample, Set) else sample
        return [_lighter(part) for part in parts]
    return [type(sample).__name__, _lighter(vars(sample))] if _is_object(sample) else sample


def _is_object(sample: Any) -> bool:
    """Whether it is told by its attributes."""
    is_plain = sample is None or isinstance(sample, (str, int, float, complex, bytes))
    return not is_plain and not hasattr(sample, "tobytes") and bool(getattr(sample, "__dict__", 0))


def digest_of(sample: Any) -> tuple[int, bool]:
    """A number for a sample, and whether its content could be read."""
    digest = hashlib.blake2b(digest_size=8)
    is_known = add(digest, _lighter(sample))
    return int.from_bytes(digest.digest(), "big") & _WORD, is_known


def chained(chain: int, *numbers: int) -> int:
    """A chain, one link longer."""
    data = b"".join(number.to_bytes(8, "big", signed=True) for number in (chain, *numbers))
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") & _WORD


class Mark(NamedTuple):
    """A place in an epoch, and a chain of digests of the samples up to it."""

    position: int = 0
    """In samples; in a stream of ready batches: in batches."""
    chain: int = 0


class Read(NamedTuple):
    """What a reader has read when it hands out a batch."""

    before: Mark
    """Where the batch begins."""
    after: Mark
    shown: tuple[int, ...] = ()
    """Digests of its first few samples, where they were hashed."""
    whole: int = 0
    """A digest of all its samples; 0 where nobody asked for it."""
    is_known: bool = True
    """Whether samples could be told apart by their content."""
    worker: int | None = None
    """The loader process that has read, where each reads a part of its own."""

    @property
    def is_end(self) -> bool:
        """Whether nothing was left to read."""
        return self.before == self.after


class ReadDigest:
    """Follows an epoch of a stream."""

    def __init__(self, mark: Mark) -> None:
        self.hashes_all = False
        """Of the batch that is read next."""
        self._position, self._chain = mark
        self._begin()

    def follow(self, samples: Iterator[Any]) -> Iterator[Any]:
        """The samples, each noted as it comes by."""
        for sample in samples:
            self._note(sample)
            yield sample

    def take(self, worker: int | None = None) -> Read:
        """What was read since the last time."""
        shown, after = tuple(self._shown), Mark(self._position, self._chain)
        read = Read(self._before, after, shown, self._whole, self._is_known, worker)
        self._begin()
        return read

    def _begin(self) -> None:
        self._before = Mark(self._position, self._chain)
        self._shown: list[int] = []
        self._whole, self._is_known = 0, True

    def _note(self, sample: Any) -> None:
        is_linked = self._position < _ALL_OF_FIRST or self._position % _EVERY == 0
        if is_linked or self.hashes_all:
            number, is_known = digest_of(sample)
            self._is_known &= is_known
            if is_linked:
                self._chain = chained(self._chain, self._position, number)
            if self.hashes_all:
                self._whole = chained(self._whole, number)
            if len(self._shown) < MOST_SHOWN:
                self._shown.append(number)
        self._position += 1

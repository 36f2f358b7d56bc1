"""Digests of samples: what a rank has read, in a few bytes that can be compared and saved.

`ReadDigest` follows a stream. Its chain depends only on the samples and their positions: ranks that
have read the same samples have the same chain, whatever their batches, and so has a run that
rereads the stream after an interruption.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any, NamedTuple

import torch

_ALL_OF_FIRST = 256
_EVERY = 64
"""After the first samples of an epoch, only every 64th is hashed, to keep reading cheap."""
_HASHED_BYTES = 1 << 16
"""Of a larger tensor, only evenly spaced elements are hashed; of longer bytes, both ends."""
MOST_SHOWN = 8
_WORD = (1 << 63) - 1


def add(digest: Any, sample: Any) -> bool:
    """Add a sample to a digest; return False if only the type of some part could be added."""
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
    """Return a reduced sample that is cheap to hash: only some elements of large parts."""
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
    """True if a sample is hashed by its attributes."""
    is_plain = sample is None or isinstance(sample, (str, int, float, complex, bytes))
    return not is_plain and not hasattr(sample, "tobytes") and bool(getattr(sample, "__dict__", 0))


def digest_of(sample: Any) -> tuple[int, bool]:
    """Return a sample's digest as a number, and whether all of its content could be hashed."""
    digest = hashlib.blake2b(digest_size=8)
    is_known = add(digest, _lighter(sample))
    return int.from_bytes(digest.digest(), "big") & _WORD, is_known


def chained(chain: int, *numbers: int) -> int:
    """Return the chain extended by one link."""
    data = b"".join(number.to_bytes(8, "big", signed=True) for number in (chain, *numbers))
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") & _WORD


class Mark(NamedTuple):
    """A position in an epoch, and the chain of digests of the samples before it."""

    position: int = 0
    """In samples; for a stream of ready batches, in batches."""
    chain: int = 0


class Read(NamedTuple):
    """What a reader has read for a batch."""

    before: Mark
    """Where the batch starts."""
    after: Mark
    shown: tuple[int, ...] = ()
    """Digests of its first few samples, where they were hashed."""
    whole: int = 0
    """A digest of all samples of the batch; 0 if it was not requested."""
    is_known: bool = True
    """Whether the content of all samples could be hashed."""
    worker: int | None = None
    """The loader process that read the batch, if each reads its own part."""

    @property
    def is_end(self) -> bool:
        """True if nothing was left to read."""
        return self.before == self.after


class ReadDigest:
    """Follows an epoch of a stream."""

    def __init__(self, mark: Mark) -> None:
        self.hashes_all = False
        """Whether every sample of the next batch is hashed."""
        self._position, self._chain = mark
        self._begin()

    def follow(self, samples: Iterator[Any]) -> Iterator[Any]:
        """Yield the samples, and add each to the digest."""
        for sample in samples:
            self._note(sample)
            yield sample

    def take(self, worker: int | None = None) -> Read:
        """Return what was read since the last call."""
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

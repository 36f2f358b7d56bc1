"""Files that a run prints into, read as they grow."""

from __future__ import annotations

import codecs
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from drivetrain.core.bounded import read_bytes

_POLL_S = 0.2
_PIECE_BYTES = 1 << 20
_ASK_EVERY_S = 2.0


def tail(
    paths: Callable[[], Iterable[Path]], is_over: Callable[[], bool], *, follow: bool
) -> Iterator[str]:
    """Everything in the files `paths` names, in that order; `follow`: until the run is over.

    `paths` is asked again each time, for a run that goes on elsewhere opens another file. `is_over`
    asks a scheduler, which is not to be bothered often.
    """
    open_files: dict[Path, _Growing] = {}
    asked_s = time.monotonic()
    is_last = not follow
    while True:
        any_new = False
        for path in paths():
            while piece := open_files.setdefault(path, _Growing(path)).more():
                any_new = True
                yield piece
        if is_last:
            return
        if not any_new:
            time.sleep(_POLL_S)
        if time.monotonic() - asked_s > _ASK_EVERY_S:
            # once more after it is over: what came between the look and the question
            is_last = is_over()
            asked_s = time.monotonic()


class _Growing:
    """A file and how much of it was read; a letter of several bytes may be half there."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._num_read = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def more(self) -> str:
        try:
            data = read_bytes(self._path, self._num_read, _PIECE_BYTES)
        except OSError:  # not there yet, or a shared file system's moment
            return ""
        self._num_read += len(data)
        return self._decoder.decode(data)

"""Following the output files of a run as they grow."""

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
    """Yield the content of the files `paths`, in that order; with `follow`, until the run is over.

    `paths` is called each time, since a run that resumes elsewhere opens another file. `is_over`
    asks a scheduler, and so is called rarely.
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
            # read once more after the end: output may have come between reading and asking
            is_last = is_over()
            asked_s = time.monotonic()


class _Growing:
    """A file and how much of it was read; a multi-byte character may be incomplete."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._num_read = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def more(self) -> str:
        try:
            data = read_bytes(self._path, self._num_read, _PIECE_BYTES)
        except OSError:  # not there yet, or a transient error of a shared file system
            return ""
        self._num_read += len(data)
        return self._decoder.decode(data)

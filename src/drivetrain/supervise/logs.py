"""Where ranks' output goes: to the terminal, or as --redirects, --tee and --log-dir say."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import Std
from torch.distributed.elastic.multiprocessing.tail_log import TailLog

from drivetrain.supervise.processes.worker import STDERR, STDOUT

_STREAMS = ((Std.OUT, STDOUT, "stdout"), (Std.ERR, STDERR, "stderr"))


class Logs:
    """Files per rank where asked for; appended to over attempts."""

    def __init__(
        self,
        log_dir: str | None = None,
        redirects: Std | Mapping[int, Std] = Std.NONE,
        tee: Std | Mapping[int, Std] = Std.NONE,
    ) -> None:
        self._redirects, self._tee = redirects, tee
        self._folder: Path | None = None
        if redirects != Std.NONE or tee != Std.NONE:
            self._folder = Path(log_dir or tempfile.mkdtemp(prefix="drivetrain-logs-"))
        self._tails: list[TailLog] = []

    def environment(self, rank: int) -> dict[str, str]:
        """Tells a worker to write to files."""
        wanted = _of(self._redirects, rank) | _of(self._tee, rank)
        return {
            variable: str(self._path(rank, name))
            for bit, variable, name in _STREAMS
            if self._folder is not None and wanted & bit
        }

    def follow(self, ranks: Sequence[int]) -> None:
        """Show what is teed, from now on; the files stay the same over attempts."""
        if self._tails:
            return
        for bit, _, name in _STREAMS:
            teed = [rank for rank in ranks if _of(self._tee, rank) & bit]
            if teed:
                target = sys.stdout if bit is Std.OUT else sys.stderr
                files = {rank: str(self._path(rank, name)) for rank in teed}
                self._tails.append(TailLog("rank", files, target).start())

    def close(self) -> None:
        """Show the rest and stop."""
        for tail in self._tails:
            tail.stop()
        self._tails = []

    def _path(self, rank: int, name: str) -> Path:
        if self._folder is None:
            raise ValueError("no folder for logs was asked for")
        folder = self._folder / f"{rank:05d}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{name}.log"


def _of(wanted: Std | Mapping[int, Std], rank: int) -> Std:
    return wanted.get(rank, Std.NONE) if isinstance(wanted, Mapping) else wanted

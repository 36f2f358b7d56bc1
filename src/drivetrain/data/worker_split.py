"""Detects whether a dataset splits its shard among loader processes; if not, it is split here.

A dataset that asks torch for the number of loader processes (`get_worker_info().num_workers`)
splits itself, as torch's documentation describes; Hugging Face's and WebDataset's do. Others yield
everything in every process.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import get_worker_info
from torch.utils.data._utils import worker as worker_module
from torch.utils.data._utils.worker import WorkerInfo

from drivetrain.core.errors import ConfigError, Problem


def hide_workers() -> tuple[int, int]:
    """Return this loader process's id and their number, and hide both from the dataset."""
    worker = get_worker_info()
    worker_module._worker_info = None  # noqa: SLF001 - torch has no other way
    return (worker.id, worker.num_workers) if worker else (0, 1)


class WatchedWorkers:
    """Shows the dataset the loader processes and records what it asks for."""

    def __init__(self) -> None:
        worker: Any = get_worker_info()
        self.id: int = worker.id if worker else 0
        self.num_workers: int = worker.num_workers if worker else 1
        self._asked: set[str] = set()
        if worker is not None:
            worker_module._worker_info = _watched(worker, self._asked)  # noqa: SLF001 - as above

    def splits_itself(self) -> bool:
        """True if the dataset splits itself; call after the first samples have been read."""
        if self.num_workers == 1 or "num_workers" in self._asked:
            return self.num_workers > 1
        if self._asked:
            raise ConfigError(
                [
                    Problem(
                        "data.num_workers",
                        "the stream asks for the loader process's "
                        f"{' and '.join(sorted(self._asked))} but not how many there are, so it "
                        "is unknown whether each process reads its own part",
                        "split it by get_worker_info().id and .num_workers, or use 0",
                        self.num_workers,
                    )
                ]
            )
        worker_module._worker_info = None  # noqa: SLF001 - as above
        return False


def _watched(worker: Any, asked: set[str]) -> Any:
    class Watched(WorkerInfo):
        def __getattribute__(self, name: str) -> Any:
            if name in ("id", "num_workers", "seed"):
                asked.add(name)
            return super().__getattribute__(name)

    fields = ("id", "num_workers", "seed", "dataset")
    return Watched(**{name: getattr(worker, name) for name in fields})

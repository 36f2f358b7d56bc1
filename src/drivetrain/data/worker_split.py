"""Loader processes of a shard: does the dataset split itself among them, or must it be done here?

A dataset that asks torch how many loader processes there are (`get_worker_info().num_workers`)
splits itself, as torch's documentation has it; Hugging Face's and WebDataset's do. Others yield
everything in every process.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import get_worker_info
from torch.utils.data._utils import worker as worker_module
from torch.utils.data._utils.worker import WorkerInfo

from drivetrain.core.errors import ConfigError, Problem


def hide_workers() -> tuple[int, int]:
    """This loader process's number and how many there are; the dataset no longer learns of it."""
    worker = get_worker_info()
    worker_module._worker_info = None  # noqa: SLF001 - torch has no other way
    return (worker.id, worker.num_workers) if worker else (0, 1)


class WatchedWorkers:
    """Lets the dataset see the loader processes, and notes what it asks."""

    def __init__(self) -> None:
        worker: Any = get_worker_info()
        self.id: int = worker.id if worker else 0
        self.num_workers: int = worker.num_workers if worker else 1
        self._asked: set[str] = set()
        if worker is not None:
            worker_module._worker_info = _watched(worker, self._asked)  # noqa: SLF001 - as above

    def splits_itself(self) -> bool:
        """Whether it does; to be asked once the first samples were read."""
        if self.num_workers == 1 or "num_workers" in self._asked:
            return self.num_workers > 1
        if self._asked:
            raise ConfigError(
                [
                    Problem(
                        "data.num_workers",
                        "the stream asks for the loader process's "
                        f"{' and '.join(sorted(self._asked))} and not how many there are, so it "
                        "cannot be told whether each process reads a part of its own",
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

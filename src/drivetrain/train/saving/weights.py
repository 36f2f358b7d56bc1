"""The trained weights at the end of a run: one file for plain torch, or a folder of shards.

A small model is gathered on rank 0 into `weights.pt`. A larger one is never whole on a rank: its
last checkpoint, of which every rank wrote a part, is copied into the files of a Hugging Face
folder, each by a different rank, as a stream of bytes. The same goes for the best checkpoint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from drivetrain.checkpoint import catalogue
from drivetrain.checkpoint.export import SharedExport, export_weights
from drivetrain.checkpoint.failures import reason
from drivetrain.checkpoint.manifest import DamagedCheckpoint, Manifest
from drivetrain.checkpoint.storage import Storage, storage_at
from drivetrain.checkpoint.weight_files import INDEX
from drivetrain.core.errors import NotSaved
from drivetrain.core.files import beside, make_folder, sync_path
from drivetrain.parallel.world import LiveWorld
from drivetrain.record.plain_run import shown
from drivetrain.train.assemble import Assembly
from drivetrain.train.saving.pretrained import keep_companions
from drivetrain.train.saving.saver import Saver, anyones
from drivetrain.train.weights.safetensors import open_folder, read_part

WHOLE_BYTES = 1 << 30
"""Weights up to this size are written as one file, unless the config says otherwise."""
LAST, BEST = "weights", "best"
_ROOM = "free some space, or make it writable"


class FinalWeights:
    """Writes the weights at the end of a run. Its methods are collective calls."""

    def __init__(self, assembly: Assembly, saver: Saver, folder: Path) -> None:
        self._assembly, self._world = assembly, assembly.world
        self._saver, self._folder = saver, folder

    @contextmanager
    def after_not_saved(self) -> Iterator[None]:
        """Context of the training: if the last step cannot be saved, try to write its weights.

        There may be room for them, or they go to another disk. NotSaved is re-raised in any case.
        """
        try:
            yield
        except NotSaved:
            with suppress(NotSaved):
                self.write_last()
            raise

    def write(self) -> None:
        """Write the last weights and, with `keep_best`, the best ones."""
        self.write_last()
        if self._assembly.config.checkpoint.keep_best is not None:
            self.write_best()
        self._saver.say_if_finished(self._address)

    def write_last(self) -> None:
        """Write the current weights; NotSaved on every rank if that fails."""
        path = self._folder / f"{LAST}.pt"
        if not self._in_shards():
            write_weights(self._assembly, path, self._saver.left_out())
            self._drop(lambda: self._saver.storage.remove(LAST))
            return
        what = f"the trained weights could not be written to {self._saver.storage.address}/{LAST}"
        remedy = f"{_ROOM}, and run the same command again"
        with self._saver.last_pieces() as (storage, manifest):
            self._put_together(storage, manifest, LAST, (what, remedy))
        self._drop(lambda: path.unlink(missing_ok=True))

    def write_best(self) -> None:
        """Write the best checkpoint's weights next to the last ones."""
        path = self._folder / f"{BEST}.pt"
        manifest = self._saver.best_checkpoint() if self._world.is_main else None
        if not self._world.agree("" if manifest is None else manifest.folder):
            return
        where = path if not self._in_shards() else f"{self._saver.storage.address}/{BEST}"
        what = f"the best weights could not be written to {where}"
        remedy = f"{_ROOM}; `drivetrain checkpoint export --best` writes them too"
        if self._in_shards():
            self._put_together(self._saver.storage, manifest, BEST, (what, remedy))
            self._drop(lambda: path.unlink(missing_ok=True))
            return
        problem = "" if manifest is None else _tried(lambda: self._export(manifest, path))
        if problem := self._world.agree(problem):
            raise NotSaved(f"{what} ({problem}); {remedy}")
        self._drop(lambda: self._saver.storage.remove(BEST))

    def _export(self, manifest: Manifest, path: Path) -> None:
        path.unlink(missing_ok=True)
        export_weights(self._saver.storage, manifest, path)

    @property
    def _address(self) -> str:
        """Where the last weights are."""
        if not self._in_shards():
            return shown(self._folder / f"{LAST}.pt")
        folder = self._saver.storage.address
        return f"{folder if '://' in folder else shown(Path(folder))}/{LAST}"

    def _in_shards(self) -> bool:
        said = self._assembly.config.checkpoint.final_weights
        # each live replica holds the whole model
        if said != "auto" or isinstance(self._world, LiveWorld):
            return said == "sharded"
        return self._assembly.weight_bytes > WHOLE_BYTES

    def _put_together(
        self, storage: Storage, manifest: Manifest | None, name: str, said: tuple[str, str]
    ) -> None:
        """Export a checkpoint in `storage` (rank 0 has its manifest) to a folder of the run."""
        world, target = self._world, self._saver.storage
        folder = world.agree("" if manifest is None else manifest.folder)
        problem = ""
        if world.is_main:
            # remove the index first: a reader meanwhile finds none and fails
            problem = _tried(lambda: target.remove(f"{name}/{INDEX}"))
            problem = problem or _tried(lambda: target.remove(name))
            problem = problem or keep_companions(self._assembly, target)
        problem = world.agree(problem)
        exports: list[SharedExport] = []

        def write() -> None:
            found = catalogue.read_manifest(storage, folder, check_sizes=False)
            exports.append(SharedExport(storage, found, world.layout.world_size))
            exports[0].write(target, name, world.rank)

        problem = anyones(problem or _tried(write), world)
        if world.is_main and not problem:
            problem = _tried(lambda: exports[0].finish(target, name))
        if problem := world.agree(problem):
            raise NotSaved(f"{said[0]} ({problem}); {said[1]}")

    def _drop(self, act: Callable[[], Any]) -> None:
        """Remove, on rank 0, an earlier attempt's weights in the other format."""
        if self._world.is_main:
            act()


def write_weights(assembly: Assembly, path: Path, left_out: Collection[str] = ()) -> None:
    """Gather the weights; rank 0 writes a temporary file and renames it, so no reader sees half."""
    weights = assembly.engine.spread.full_state(
        lambda name: name not in left_out, keep=assembly.world.is_main
    )
    problem = _tried(lambda: _replace(weights, path)) if assembly.world.is_main else ""
    if problem := assembly.world.agree(problem):
        raise NotSaved(
            f"the trained weights could not be written to {path} ({problem}); {_ROOM}, and run "
            "the same command again"
        )


def read_weights(checkpoints: Path, name: str = LAST) -> dict[str, torch.Tensor]:
    """Return the whole weights that a run wrote, in either format."""
    if (checkpoints / f"{name}.pt").exists():
        whole: dict[str, torch.Tensor] = torch.load(checkpoints / f"{name}.pt", weights_only=True)
        return whole
    storage = storage_at(checkpoints / name)
    stored = open_folder(storage.address).tensors
    return {key: read_part(storage, each, ()) for key, each in stored.items()}


def _tried(act: Callable[[], Any]) -> str:
    """Return the error as text, or an empty string. torch's writer raises RuntimeError."""
    try:
        act()
    except (OSError, RuntimeError, DamagedCheckpoint) as error:
        return reason(error)
    return ""


def _replace(weights: dict[str, Any], path: Path) -> None:
    make_folder(path.parent)
    with beside(path) as partial:
        with partial.open("wb") as stream:  # given a path, torch would store its random name in it
            torch.save(weights, stream)
        sync_path(partial)
        partial.replace(path)
    sync_path(path.parent)


def weights_sha256(weights: dict[str, Any]) -> str:
    """Return a SHA-256 of all tensors' names and bytes, in the order of their names."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach().cpu().contiguous()
        digest.update(name.encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()

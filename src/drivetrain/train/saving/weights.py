"""The trained weights in one file that plain torch can read."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from drivetrain.checkpoint.export import export_weights
from drivetrain.checkpoint.failures import reason
from drivetrain.checkpoint.manifest import DamagedCheckpoint
from drivetrain.core.errors import NotSaved
from drivetrain.core.files import beside, make_folder, sync_path
from drivetrain.parallel.world import World
from drivetrain.train.assemble import Assembly
from drivetrain.train.saving.saver import Saver


def write_weights(assembly: Assembly, path: Path, left_out: Collection[str] = ()) -> None:
    """All ranks gather; rank 0 writes beside the file and renames, so nobody reads half of it."""
    weights = assembly.engine.spread.full_state(
        lambda name: name not in left_out, keep=assembly.world.is_main
    )
    problem = _write(weights, path) if assembly.world.is_main else ""
    if problem := assembly.world.agree(problem):
        raise NotSaved(
            f"the trained weights could not be written to {path} ({problem}); make room, or see "
            "that it can be written, and run the same command again"
        )


def write_best(world: World, saver: Saver, path: Path) -> None:
    """The best checkpoint's weights beside the last ones. Rank 0 reads and writes them."""
    problem = ""
    if world.is_main and (manifest := saver.best_checkpoint()) is not None:
        try:
            path.unlink(missing_ok=True)
            export_weights(saver.storage, manifest, path)
        except (OSError, RuntimeError, DamagedCheckpoint) as error:
            problem = reason(error)
    if problem := world.agree(problem):
        raise NotSaved(
            f"the best weights could not be written to {path} ({problem}); make room, or see that "
            "it can be written; `drivetrain checkpoint export --best` makes them too"
        )


def _write(weights: dict[str, Any], path: Path) -> str:
    """What went wrong, if something did. Torch's own writer says it with a RuntimeError."""
    try:
        _replace(weights, path)
    except (OSError, RuntimeError) as error:
        return reason(error)
    return ""


def _replace(weights: dict[str, Any], path: Path) -> None:
    make_folder(path.parent)
    with beside(path) as partial:
        torch.save(weights, partial)
        sync_path(partial)
        partial.replace(path)
    sync_path(path.parent)


def weights_sha256(weights: dict[str, Any]) -> str:
    """A fingerprint of every bit of every tensor, in the order of their names."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach().cpu().contiguous()
        digest.update(name.encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()

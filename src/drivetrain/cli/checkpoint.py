"""`drivetrain checkpoint`: list, verify, export, compare. Only the last two import torch."""

from __future__ import annotations

import errno
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from drivetrain.checkpoint import catalogue
from drivetrain.checkpoint.catalogue import Entry
from drivetrain.checkpoint.locate import Located, damaged, locate
from drivetrain.checkpoint.manifest import DamagedCheckpoint
from drivetrain.cli.terminal import terminal
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.core.text import readable_bytes

if TYPE_CHECKING:
    from drivetrain.checkpoint.compare import Comparison, Difference
    from drivetrain.checkpoint.export import Form

_SHOWN_DIFFERENCES = 40
_FILE_ENDINGS = (".safetensors", ".bin", ".pth", ".ckpt")
"""Endings that people give to one file of weights."""


def ls(address: str, *, as_json: bool) -> int:
    """List the checkpoints, newest first."""
    located = locate(address)
    _show_entries(located.entries(), as_json=as_json)
    return 0


def verify(address: str, *, as_json: bool) -> int:
    """Read every byte; return 1 if a checkpoint is damaged or none is good."""
    located = locate(address)
    checked = [_verified(located, entry) for entry in located.entries()]
    _show_entries(checked, as_json=as_json)
    states = [entry.state for entry in checked]
    return 0 if "good" in states and "damaged" not in states else 1


def export(
    address: str,
    target: str,
    step: int | None,
    max_shard_gb: float,
    form: Form = "auto",
    *,
    best: bool = False,
    averages: bool = False,
) -> int:
    """Write the weights as files for other libraries."""
    from drivetrain.checkpoint.export import export_weights

    _check_name(target, form)
    located = locate(address)
    if best and step is not None:
        rule, remedy = "conflicts with --best", "give one of the two"
        raise ConfigError([Problem("--step", rule, remedy, step)])
    if not 0 < max_shard_gb < math.inf:
        rule, remedy = "must be a number above 0", "--max-shard-gb 5"
        raise ConfigError([Problem("--max-shard-gb", rule, remedy, max_shard_gb)])
    manifest = located.choose(located.best_step() if best else step)
    try:
        shard_bytes = int(max_shard_gb * 1e9)
        done = export_weights(
            located.storage, manifest, Path(target), shard_bytes, form, averages=averages
        )
    except DamagedCheckpoint as error:
        raise damaged(manifest.folder, error) from error
    except OSError as error:
        if not _is_about(error, Path(target)):
            raise
        rule, remedy = f"cannot be written ({error.strerror})", "choose a place that you can write"
        raise ConfigError([Problem("TARGET", rule, remedy, target)]) from error
    files = f" ({done.files[0] if len(done.files) == 1 else f'{len(done.files)} files'})"
    if done.files == (Path(target).name,):  # the target is the file
        files = ""
    console = terminal(soft_wrap=True, markup=False)
    part = " (trained parameters only)" if manifest.contents == "trained" else ""
    console.print(
        f"{manifest.folder}: {done.num_tensors} tensors{part}, {readable_bytes(done.num_bytes)} → "
        f"{target}{files}"
    )
    return 0


def _check_name(target: str, form: Form) -> None:
    """Refuse a file's name for what will be a folder."""
    path = Path(target)
    if form == "pt" or path.suffix not in _FILE_ENDINGS:
        return
    rule = "the name of a file, but a folder is written, with model.safetensors in it"
    remedy = f"write {path.with_suffix('')} for the folder, or {path.with_suffix('.pt')} for a file"
    raise ConfigError([Problem("TARGET", rule, remedy, target)])


def _is_about(error: OSError, target: Path) -> bool:
    """Whether an error was raised while writing the target, not while reading the checkpoint."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        return True
    at = Path(str(error.filename or ""))
    partial = f".{target.name}."  # the beginning of the name that the target has until it is whole
    return at in (target, *target.parents) or any(each.startswith(partial) for each in at.parts)


def diff(here: str, there: str, *, as_json: bool) -> int:
    """Show what differs; return 1 if anything does."""
    from drivetrain.checkpoint.compare import compare

    sides = []
    for address in (here, there):
        located = locate(address)
        sides.append((located.storage, located.choose()))
    try:
        found = compare(sides[0], sides[1])
    except DamagedCheckpoint as error:
        raise damaged(f"{here} or {there}", error) from error
    if as_json:
        _print_json(
            {
                "here": sides[0][1].folder,
                "there": sides[1][1].folder,
                "identical_tensors": found.num_identical,
                "differences": [asdict(each) for each in found.differences],
            }
        )
    else:
        _show_differences(found)
    return 0 if found.is_same else 1


def _verified(located: Located, entry: Entry) -> Entry:
    if entry.manifest is None:
        return entry
    try:
        catalogue.verify(located.storage, entry.folder)
    except DamagedCheckpoint as error:
        return replace(entry, manifest=None, problem=str(error))
    return entry


def _show_entries(entries: Sequence[Entry], *, as_json: bool) -> None:
    if as_json:
        _print_json([_as_dict(entry) for entry in entries])
        return
    table = Table(box=None, pad_edge=False)
    for name in ("checkpoint", "written", "size", "state"):
        table.add_column(name, no_wrap=True, justify="right" if name == "size" else "left")
    table.add_column("layout or problem")
    for entry in entries:
        table.add_row(entry.folder, *_cells(entry))
    terminal(markup=False).print(table)


def _cells(entry: Entry) -> tuple[str, str, str, str]:
    manifest = entry.manifest
    if manifest is None:
        return "", "", entry.state, entry.problem
    written = time.strftime("%Y-%m-%d %H:%M", time.localtime(manifest.created_s))
    axes = [f"{axis}={size}" for axis, size in manifest.layout.items() if size > 1]
    layout = " ".join([manifest.strategy, *(axes or ["one rank"])])
    if manifest.contents != "everything":
        layout += f", {manifest.contents} only"
    if manifest.num_referred_bytes:
        layout += f", + {readable_bytes(manifest.num_referred_bytes)} in earlier ones"
    return written, readable_bytes(manifest.num_bytes), entry.state, layout


def _as_dict(entry: Entry) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "folder": entry.folder,
        "step": entry.step,
        "attempt": entry.attempt,
        "state": entry.state,
        "problem": entry.problem or None,
    }
    if entry.manifest is not None:
        manifest = entry.manifest
        shown |= {
            "bytes": manifest.num_bytes,
            "referred_bytes": manifest.num_referred_bytes,
            "refers_to": list(entry.refers_to),
            "created_s": manifest.created_s,
            "contents": manifest.contents,
            "strategy": manifest.strategy,
            "layout": dict(manifest.layout),
            "position": dict(manifest.position),
            "versions": dict(manifest.versions),
        }
    return shown


def _show_differences(found: Comparison) -> None:
    console = terminal(markup=False)
    if found.is_same:
        console.print(f"the same: {found.num_identical} tensors bit for bit, and every value")
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("name", overflow="fold")
    table.add_column("difference", overflow="fold")
    table.add_column("largest gap", no_wrap=True, justify="right")
    for each in found.differences[:_SHOWN_DIFFERENCES]:
        gap = "" if each.max_abs is None else f"{each.max_abs:.3g}"
        table.add_row(each.name, _shown(each), gap)
    console.print(table)
    hidden = len(found.differences) - _SHOWN_DIFFERENCES
    more = f" ({hidden} not shown; --json has them all)" if hidden > 0 else ""
    console.print(
        f"{len(found.differences)} differences{more}; "
        f"{found.num_identical} tensors are the same bit for bit"
    )


def _shown(each: Difference) -> str:
    return f"{each.here} → {each.there}" if each.max_abs is None else each.here


def _print_json(document: Any) -> None:
    terminal(soft_wrap=True, markup=False).print(json.dumps(document, indent=2))

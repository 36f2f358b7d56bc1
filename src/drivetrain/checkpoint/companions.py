"""Companions: a Hugging Face model's own files, stored beside a run's checkpoints for exports.

These are its config, and the tokenizer's files if the task has one: JSON and plain text, written
when a run starts. An export does not trust them: it accepts only a few small files, no links, no
code, and valid JSON.
"""

from __future__ import annotations

import re
from pathlib import Path

from drivetrain.checkpoint.storage import LocalStorage, Storage
from drivetrain.core.bounded import parse_json
from drivetrain.core.errors import DamagedRun

FOLDER = "huggingface"
CONFIG = "config.json"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*\.(json|txt|jinja|model|tiktoken)")
_WEIGHTS = re.compile(r".*\.index\.json")
_MOST_FILES = 32
_MOST_BYTES = 64 << 20
"""Per file: a tokenizer with 260,000 tokens takes 33 MB."""


def keep(storage: Storage, folder: Path) -> None:
    """Store the config and tokenizer files of a folder."""
    for path in sorted(folder.iterdir()):
        if path.is_file() and _is_companion(path.name):
            storage.put(f"{FOLDER}/{path.name}", path.read_bytes())


def kept(storage: Storage) -> dict[str, bytes]:
    """Return the stored files by name; DamagedRun for anything a run does not write."""
    names = [name for name in storage.names(FOLDER) if _is_companion(name)]
    if len(names) > _MOST_FILES:
        raise DamagedRun(f"{storage.address}/{FOLDER}: {len(names)} files; a run writes fewer")
    return {name: _read(storage, name) for name in names}


def _is_companion(name: str) -> bool:
    return _NAME.fullmatch(name) is not None and _WEIGHTS.fullmatch(name) is None


def _read(storage: Storage, name: str) -> bytes:
    where = f"{storage.address}/{FOLDER}/{name}"
    if isinstance(storage, LocalStorage):
        folder = storage.path / FOLDER
        if folder.is_symlink() or (folder / name).is_symlink():
            # it would add a file from elsewhere on this machine to the export
            raise DamagedRun(f"{where}: a link, not a file; remove it")
    data = storage.read(f"{FOLDER}/{name}", most=_MOST_BYTES)
    if name.endswith(".json"):
        try:
            parse_json(data)
        except ValueError as error:
            raise DamagedRun(f"{where}: not JSON ({error}); remove it") from None
    return data

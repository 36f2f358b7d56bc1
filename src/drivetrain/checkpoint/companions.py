"""Companions: a Hugging Face model's own files, kept beside a run's checkpoints for its exports.

Its config, and its tokenizer's if the task has one: JSON and plain text, written when a run starts.
Whoever exports does not trust them: few, small, no links, no code, and JSON that is JSON.
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
"""Of each: a tokenizer of 260,000 words has 33 MB."""


def keep(storage: Storage, folder: Path) -> None:
    """Those of a folder's files that are a config's or a tokenizer's."""
    for path in sorted(folder.iterdir()):
        if path.is_file() and _is_companion(path.name):
            storage.put(f"{FOLDER}/{path.name}", path.read_bytes())


def kept(storage: Storage) -> dict[str, bytes]:
    """By name; empty where none were kept. DamagedRun for what no run has written."""
    names = [name for name in storage.names(FOLDER) if _is_companion(name)]
    if len(names) > _MOST_FILES:
        raise DamagedRun(f"{storage.address}/{FOLDER}: {len(names)} files; no run has written them")
    return {name: _read(storage, name) for name in names}


def _is_companion(name: str) -> bool:
    return _NAME.fullmatch(name) is not None and _WEIGHTS.fullmatch(name) is None


def _read(storage: Storage, name: str) -> bytes:
    where = f"{storage.address}/{FOLDER}/{name}"
    if isinstance(storage, LocalStorage):
        folder = storage.path / FOLDER
        if folder.is_symlink() or (folder / name).is_symlink():
            # it would put a file from elsewhere on this machine among what is handed on
            raise DamagedRun(f"{where}: a link, not a file; remove it")
    data = storage.read(f"{FOLDER}/{name}", most=_MOST_BYTES)
    if name.endswith(".json"):
        try:
            parse_json(data)
        except ValueError as error:
            raise DamagedRun(f"{where}: not JSON ({error}); remove it") from None
    return data

"""Test a place by really writing, reading back, renaming and deleting a file."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from drivetrain.core.files import beside
from drivetrain.core.redaction import clean_text
from drivetrain.doctor.facts import StorageProbe

_PROBE_BYTES = 8 * 2**20
_STORE_PATIENCE_S = 15.0


def probe(address: str) -> StorageProbe:
    """Test a directory, or any address that fsspec supports (s3://…)."""
    if "://" not in address or address.startswith("file://"):
        return probe_folder(Path(address.removeprefix("file://")))
    return _probe_store_apart(address)


def probe_folder(folder: Path) -> StorageProbe:
    """Do what a checkpoint does, with a small file, in the nearest existing directory."""
    existing = _nearest_existing(folder)
    data = os.urandom(2**20) * (_PROBE_BYTES // 2**20)
    target = existing / f".drivetrain-doctor-{uuid.uuid4().hex[:8]}"
    act = "write"
    try:
        free, total = _space(existing)
        with beside(target) as partial:
            began = time.perf_counter()
            _write(partial, data)
            rate = len(data) / (time.perf_counter() - began)
            act = "read back"
            if partial.read_bytes() != data:
                return StorageProbe(
                    str(folder), act, "the bytes differ from what was written", free, total
                )
            act = "rename"
            partial.rename(target)
            act = "link"
            os.link(target, partial)
        act = "delete"
        target.unlink()
    except OSError as error:
        free, total = _space(existing)
        with suppress(OSError):  # deleting may fail where writing did
            target.unlink(missing_ok=True)
        return StorageProbe(str(folder), act, _reason(error), free, total)
    return StorageProbe(str(folder), None, "", free, total, rate)


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _nearest_existing(folder: Path) -> Path:
    whole = folder.absolute()
    return next(each for each in (whole, *whole.parents) if each.is_dir())


def _space(folder: Path) -> tuple[int | None, int | None]:
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None, None
    return usage.free, usage.total


def _reason(error: OSError) -> str:
    name = errno.errorcode.get(error.errno or 0, type(error).__name__)
    return f"{name}, {error.strerror}"


def _probe_store_apart(address: str) -> StorageProbe:
    """Test a store in a separate process: libraries retry for minutes, the doctor needs seconds."""
    command = [sys.executable, "-m", "drivetrain.doctor.storage", address]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=_STORE_PATIENCE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return StorageProbe(address, "write", f"no answer in {_STORE_PATIENCE_S:.0f} s")
    if result.returncode:
        last = (result.stderr.strip().splitlines() or ["no message"])[-1]
        return StorageProbe(address, "reach", clean_text(last)[:200])
    return StorageProbe(**json.loads(result.stdout))


def probe_store(address: str) -> StorageProbe:
    """Test an object store, which has no rename: put, read back and delete an object."""
    from drivetrain.checkpoint.storage import storage_at

    data = os.urandom(2**20)
    name = f".drivetrain-doctor-{uuid.uuid4().hex[:8]}"
    act = "reach"
    try:
        storage = storage_at(address)
        act = "write"
        began = time.perf_counter()
        storage.put(name, data)
        rate = len(data) / (time.perf_counter() - began)
        act = "read back"
        if storage.read(name) != data:
            return StorageProbe(address, act, "the bytes differ from what was written")
        act = "delete"
        storage.remove(name)
        if storage.size(name) is not None:
            return StorageProbe(address, act, "the object is still there")
    except Exception as error:  # whatever the store's library raises is the evidence
        text = " ".join(str(error).split())
        return StorageProbe(address, act, clean_text(f"{type(error).__name__}: {text}")[:200])
    return StorageProbe(address, None, "", write_bytes_per_s=rate)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(probe_store(sys.argv[1]))))

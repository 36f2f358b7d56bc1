"""Mutants no operator makes: a guard that is gone, an order turned round. All must be killed."""

from __future__ import annotations

from pathlib import Path

from tests.mutation.mutants import Mutant
from tests.mutation.table import PLANTED

_CHECKPOINT = "src/drivetrain/checkpoint"
# a name, a file, the function it is in, the text that is replaced, and what replaces it
_PLANTED = (
    (
        "a stream is not synced",
        f"{_CHECKPOINT}/storage.py",
        "LocalStorage.writing",
        "            yield file\n            file.flush()\n            os.fsync(file.fileno())\n",
        "            yield file\n            file.flush()\n",
    ),
    (
        "a folder is not synced after a rename",
        f"{_CHECKPOINT}/storage.py",
        "LocalStorage.put",
        "            partial.replace(path)\n        sync_path(path.parent)\n",
        "            partial.replace(path)\n",
    ),
    (
        "a folder is not synced after a link",
        f"{_CHECKPOINT}/storage.py",
        "LocalStorage.create",
        "                return self._create_without_links(path, data)\n"
        "        sync_path(path.parent)\n",
        "                return self._create_without_links(path, data)\n",
    ),
    (
        "a file without links is not synced",
        f"{_CHECKPOINT}/storage.py",
        "LocalStorage._create_without_links",
        "                file.write(data)\n                file.flush()\n"
        "                os.fsync(file.fileno())\n",
        "                file.write(data)\n",
    ),
    (
        "a deleted manifest is not synced",
        f"{_CHECKPOINT}/storage.py",
        "LocalStorage.remove",
        "            sync_path(path.parent)  # what is deleted next must not be gone before it\n",
        "",
    ),
    (
        "the manifest is deleted last",
        f"{_CHECKPOINT}/checkpointer.py",
        "Checkpointer._delete",
        '        self.storage.remove(f"{folder}/{NAME}")  # first: half of it never counts\n',
        "",
    ),
    (
        "the manifest is committed by a stale attempt",
        f"{_CHECKPOINT}/checkpointer.py",
        "Checkpointer._commit",
        "        lineage.check_not_stale(self.storage, self.attempt)\n"
        "        whole = replace(manifest, files=tuple(files))\n",
        "        whole = replace(manifest, files=tuple(files))\n",
    ),
    (
        "a save that failed is kept",
        f"{_CHECKPOINT}/checkpointer.py",
        "Checkpointer.wait",
        "                    self.storage.remove(pending.folder)\n",
        "                    pass\n",
    ),
    (
        "an error of the storage is taken for damage",
        f"{_CHECKPOINT}/checkpointer.py",
        "Checkpointer._read",
        "            if any(is_of_the_storage(cause) for cause in causes(error)):\n"
        "                raise\n",
        "",
    ),
    (
        "shapes are not compared on resume",
        f"{_CHECKPOINT}/fitting.py",
        "check_shapes",
        "    if wrong:\n        raise ConfigError(wrong[:5])\n",
        "    pass\n",
    ),
    (
        "a checksum is not compared",
        f"{_CHECKPOINT}/shards.py",
        "ShardReader.tensor",
        "        if len(data) != piece.length or checksum(data) != piece.crc32:\n",
        "        if len(data) != piece.length:\n",
    ),
    (
        "a step without tokens is divided by zero",
        "src/drivetrain/train/watch/meter.py",
        "Meter.count_correction",
        "        count = torch.where(here.global_count == 0, 1.0, here.global_count)\n",
        "        count = here.global_count\n",
    ),
    (
        "a save that failed is not tried again",
        "src/drivetrain/train/saving/timetable.py",
        "Timetable.wants_retry",
        "        return failed_s is not None and time.perf_counter() - failed_s > _RETRY_AFTER_S\n",
        "        return False\n",
    ),
)


def planted() -> list[Mutant]:
    """AssertionError when the code has moved on without them."""
    return [_mutant(*each) for each in _PLANTED]


def _mutant(name: str, file: str, function: str, before: str, after: str) -> Mutant:
    source = Path(file).read_text()
    if source.count(before) != 1:
        raise AssertionError(f"{file} does not have once what {name!r} replaces")
    at = source[: source.index(before)].count("\n") + 1
    lines = (at, at + before.count("\n"))
    shown = f"{PLANTED}{name}"
    text = source.replace(before, after)
    return Mutant(file, at, lines, function, 0, shown, "", text)

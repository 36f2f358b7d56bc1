"""Runs that end early and are gone on with, and checkpoints that are tampered with meanwhile."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from drivetrain.checkpoint.manifest import NAME, File, Manifest, checksum
from drivetrain.record import session


class Interrupted(Exception):
    """What a hook raises where a test wants a run to end."""


def go_on_in(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next fit() of this process is the run in `run_dir`, as after a new start."""
    monkeypatch.setenv(session.RUN_DIR, str(run_dir))
    monkeypatch.setattr(session, "_opened", 0)


def make_sums_fit(folder: Path) -> None:
    """Sizes and checksums of the manifest, from the files as they are now."""
    old = Manifest.from_json((folder / NAME).read_bytes())
    files = []
    for file in old.files:
        content = (folder / file.name).read_bytes()
        files.append(File(file.name, len(content), checksum(content)))
    (folder / NAME).write_bytes(replace(old, files=tuple(files)).to_json())

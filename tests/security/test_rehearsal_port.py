"""A rehearsal's letters decide what its ranks do next: nobody else on the machine may write one."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest

from drivetrain.rehearse import client
from drivetrain.rehearse.findings import RankReport


def test_letters_go_through_a_folder_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    seen: dict[str, Any] = {}

    class Process:
        def __init__(self, part: Any) -> None:
            folder = Path(part.letters).parent
            seen.update(folder=folder, mode=stat.S_IMODE(folder.stat().st_mode))

        @classmethod
        def start(cls, part: Any) -> Process:
            return cls(part)

        def receive(self, timeout_s: float) -> RankReport:
            return RankReport(0, "")

        def end(self) -> None:
            pass

    monkeypatch.setattr(client, "_Process", Process)
    monkeypatch.setattr(client, "_end_server", lambda: None)
    client.rehearse(client.RehearsalRequest((str(script),), 2))
    assert seen["mode"] == 0o700
    assert not seen["folder"].exists()

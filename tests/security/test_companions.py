"""A config and a tokenizer beside checkpoints are read as what somebody else may have written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from drivetrain.checkpoint import companions
from drivetrain.checkpoint.storage import storage_at
from drivetrain.core.errors import DamagedRun


def spoil_with_link(folder: Path) -> None:
    (folder.parent.parent / "secret.json").write_text("{}")
    (folder / "vocab.json").symlink_to(folder.parent.parent / "secret.json")


def spoil_with_linked_folder(folder: Path) -> None:
    folder.rename(folder.parent.parent / "elsewhere")
    folder.symlink_to(folder.parent.parent / "elsewhere")


def spoil_with_text(folder: Path) -> None:
    (folder / "config.json").write_text("root:x:0:0")


def spoil_with_depth(folder: Path) -> None:
    (folder / "config.json").write_text("[" * 200_000)


def spoil_with_size(folder: Path) -> None:
    with (folder / "tokenizer.json").open("wb") as file:
        file.truncate(1 << 40)


def spoil_with_number(folder: Path) -> None:
    for number in range(100):
        (folder / f"{number}.txt").touch()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (spoil_with_link, "vocab.json: a link"),
        (spoil_with_linked_folder, "config.json: a link"),
        (spoil_with_text, "config.json: not JSON"),
        (spoil_with_depth, "config.json: not JSON .nested too deeply"),
        (spoil_with_size, "tokenizer.json: 1.0 TiB, but at most 64.0 MiB are read"),
        (spoil_with_number, "101 files; a run writes fewer"),
    ],
)
def test_what_no_run_wrote_is_refused(
    spoil: Callable[[Path], None], said: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run" / companions.FOLDER
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    spoil(folder)
    with pytest.raises(DamagedRun, match=said):
        companions.kept(storage_at(tmp_path / "run"))


def test_code_and_weights_are_neither_kept_nor_handed_on(tmp_path: Path) -> None:
    made, storage = tmp_path / "made", storage_at(tmp_path / "run")
    made.mkdir()
    names = ("config.json", "merges.txt", "spiece.model", "chat_template.jinja")
    others = ("modeling.py", "pytorch_model.bin", "model.safetensors.index.json", ".hidden.json")
    for name in (*names, *others):
        (made / name).write_text("{}")
    companions.keep(storage, made)
    assert sorted(storage.names(companions.FOLDER)) == sorted(names)
    for name in others:
        storage.put(f"{companions.FOLDER}/{name}", b"{}")
    assert companions.kept(storage).keys() == {*names}

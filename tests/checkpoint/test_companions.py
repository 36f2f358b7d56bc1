"""Companions: the user's own objects beside the weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from drivetrain.checkpoint import companions
from drivetrain.checkpoint.storage import LocalStorage
from drivetrain.core.errors import DamagedRun


def test_a_models_config_and_its_tokenizers_files_are_kept_and_nothing_else(
    tmp_path: Path,
) -> None:
    model, storage = tmp_path / "model", LocalStorage(tmp_path / "run")
    kept = {"config.json": b"{}", "vocab.txt": b"a", "chat.jinja": b"b", "sp.model": b"c"}
    others = ["model.safetensors.index.json", "weights.bin", "code.py", ".hidden.json"]
    model.mkdir()
    for name in (*kept, *others):
        (model / name).write_bytes(kept.get(name, b"{}"))
    (model / "folder.json").mkdir()
    companions.keep(storage, model)
    assert companions.kept(storage) == kept
    for name in others:
        storage.put(f"huggingface/{name}", b"{}")
    assert companions.kept(storage) == kept
    assert companions.kept(LocalStorage(tmp_path / "nowhere")) == {}


def test_more_companions_than_a_run_writes_are_refused(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    for number in range(32):
        storage.put(f"huggingface/{number}.txt", b"")
    assert len(companions.kept(storage)) == 32
    storage.put("huggingface/more.txt", b"")
    with pytest.raises(DamagedRun) as caught:
        companions.kept(storage)
    assert str(caught.value) == f"{tmp_path}/huggingface: 33 files; a run writes fewer"


def test_companions_that_are_links_or_no_json_are_refused(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "run")
    storage.put("huggingface/config.json", b"{")
    where = f"{tmp_path}/run/huggingface/config.json"
    with pytest.raises(DamagedRun) as caught:
        companions.kept(storage)
    assert str(caught.value).startswith(f"{where}: not JSON (")
    assert str(caught.value).endswith("); remove it")
    (tmp_path / "secret").write_text("{}")
    (tmp_path / "run/huggingface/config.json").unlink()
    (tmp_path / "run/huggingface/config.json").symlink_to(tmp_path / "secret")
    with pytest.raises(DamagedRun) as caught:
        companions.kept(storage)
    assert str(caught.value) == f"{where}: a link, not a file; remove it"
    other = LocalStorage(tmp_path / "other")
    other.path.mkdir()
    (other.path / "huggingface").symlink_to(tmp_path / "run/huggingface")
    with pytest.raises(DamagedRun, match="a link, not a file"):
        companions.kept(other)


def test_a_companion_that_is_too_large_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(companions, "_MOST_BYTES", 3)
    storage = LocalStorage(tmp_path)
    storage.put("huggingface/a.txt", b"123")
    assert companions.kept(storage) == {"a.txt": b"123"}
    storage.put("huggingface/a.txt", b"1234")
    with pytest.raises(DamagedRun):
        companions.kept(storage)

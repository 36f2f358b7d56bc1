"""Where a run directory says that its checkpoints lie: not every storage is gone to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fsspec
import pytest

from drivetrain.checkpoint.locate import locate
from drivetrain.core.errors import ConfigError


def _run_that_names(path: Path, directory: Any) -> Path:
    path.mkdir()
    (path / "run.yaml").write_text(json.dumps({"config": {"checkpoint": {"directory": directory}}}))
    return path


@pytest.mark.parametrize(
    "directory",
    [
        "reference://::file:///tmp/refs.json",
        "simplecache::s3://bucket/run",
        "file:///tmp/x::zip://y",
        "python://x",
        "github://a:b@main/",
        "ssh://elsewhere/x",
        "http://elsewhere/x",
        "memory://x",
        "REFERENCE://x",
        " reference://x",
        "reference:x::file://y",
    ],
)
def test_an_address_in_a_run_directory_is_not_followed_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, directory: str
) -> None:
    def opened(*words: Any, **more: Any) -> None:
        raise AssertionError(f"fsspec was asked for {words}")

    monkeypatch.setattr(fsspec.core, "url_to_fs", opened)
    with pytest.raises(ConfigError, match="checkpoint.directory.*pass the address yourself"):
        locate(str(_run_that_names(tmp_path / "run", directory)))


@pytest.mark.parametrize("scheme", ["s3", "s3a", "gs", "gcs", "abfs", "abfss", "az"])
def test_object_stores_are_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    asked: list[str] = []

    def opened(address: str) -> tuple[Any, str]:
        asked.append(address)
        return fsspec.filesystem("memory"), "nowhere"

    monkeypatch.setattr(fsspec.core, "url_to_fs", opened)
    with pytest.raises(ConfigError, match="no checkpoints found"):
        locate(str(_run_that_names(tmp_path / "run", f"{scheme}://bucket/run")))
    assert asked == [f"{scheme}://bucket/run"]


def test_a_path_is_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere" / "step-000000001-a1").mkdir(parents=True)
    run = _run_that_names(tmp_path / "run", str(tmp_path / "elsewhere"))
    assert [entry.step for entry in locate(str(run)).entries()] == [1]


@pytest.mark.parametrize("directory", [5, ["s3://x"], {"a": 1}])
def test_what_is_no_address_is_said(tmp_path: Path, directory: object) -> None:
    with pytest.raises(ConfigError, match="checkpoint.directory"):
        locate(str(_run_that_names(tmp_path / "run", directory)))

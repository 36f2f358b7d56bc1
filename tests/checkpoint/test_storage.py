"""Storage: folders of steps, on a disk and elsewhere."""

from __future__ import annotations

import io
from typing import Any

import pytest

from drivetrain.checkpoint import storage
from drivetrain.checkpoint.storage import RemoteStorage, storage_at
from drivetrain.core.errors import ConfigError, EnvironmentProblem
from drivetrain.core.requirements import install_command


def test_a_store_whose_library_is_missing_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import fsspec

    def missing(address: str) -> Any:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    for address, remedy in (
        ("s3://bucket", install_command("s3")),
        ("s3a://bucket", install_command("s3")),
        ("gs://bucket", "install the package it names"),
    ):
        with pytest.raises(EnvironmentProblem) as caught:
            storage_at(address)
        assert str(caught.value) == f"address = {address}: Install s3fs to access S3; {remedy}"


def test_an_address_nobody_knows_says_what_to_give() -> None:
    with pytest.raises(ConfigError) as caught:
        storage_at("nowhere://x")
    assert str(caught.value).endswith("; give a path, or an address fsspec knows (s3://…, gs://…)")


class Listing:
    """A store's answers."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def invalidate_cache(self) -> None:
        self.asked.append("anew")

    def ls(self, path: str, detail: bool) -> list[str]:
        self.asked.append((path, detail))
        if path.endswith("none"):
            raise FileNotFoundError(path)
        return ["bucket/run/b/", "bucket/run/a.json", "bucket/run/", "bucket/run"]

    def info(self, path: str) -> dict[str, Any]:
        return {"size": "12"}

    def cat_file(self, path: str, start: int, end: int | None) -> bytearray:
        self.asked.append((path, start, end))
        return bytearray(b"data")

    def rm(self, path: str, recursive: bool) -> None:
        self.asked.append((path, recursive))
        if path.endswith("none"):
            raise FileNotFoundError(path)


def remote(monkeypatch: pytest.MonkeyPatch) -> tuple[RemoteStorage, Listing]:
    store = Listing()
    monkeypatch.setattr(storage, "_open_store", lambda _: (store, "bucket/run/"))
    return RemoteStorage("s3://bucket/run/"), store


def test_a_folder_of_a_store_is_listed_anew_and_without_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place, store = remote(monkeypatch)
    assert place.address == "s3://bucket/run"
    assert place.names() == ["a.json", "b"]
    assert store.asked == ["anew", ("bucket/run", False)]
    assert place.names("none") == []
    assert store.asked[-1] == ("bucket/run/none", False)
    assert place.size("a.json") == 12


def test_a_store_is_asked_for_just_the_bytes_that_are_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place, store = remote(monkeypatch)
    assert place.read("a", 3, 4) == b"data"
    assert store.asked == [("bucket/run/a", 3, 7)], "one request for a part"
    assert place.read("a", 5, 0) == b""
    assert len(store.asked) == 1
    assert isinstance(place.read("a"), bytes)
    assert store.asked[-1] == ("bucket/run/a", 0, None)
    place.remove("a")
    place.remove("none")
    assert store.asked[-2:] == [("bucket/run/a", True), ("bucket/run/none", True)]


class Upload(io.BytesIO):
    """A stream to a store."""

    is_discarded = False

    def discard(self) -> None:
        self.is_discarded = True


def test_a_stream_to_a_store_that_breaks_leaves_no_object(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place, store = remote(monkeypatch)
    opened: list[tuple[str, str]] = []
    broken, whole = Upload(), Upload()
    uploads = [broken, whole]

    def start(path: str, mode: str) -> Upload:
        opened.append((path, mode))
        return uploads.pop(0)

    monkeypatch.setattr(store, "open", start, raising=False)
    with pytest.raises(ValueError, match="half"), place.writing("a") as stream:
        stream.write(b"1")
        raise ValueError("half")
    assert broken.is_discarded
    assert not broken.closed
    with place.writing("b") as stream:
        stream.write(b"12")
    assert whole.closed
    assert not whole.is_discarded
    assert opened == [("bucket/run/a", "wb"), ("bucket/run/b", "wb")]

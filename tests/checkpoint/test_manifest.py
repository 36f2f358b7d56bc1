"""Manifests: what a step has, and what damaged ones say."""

from __future__ import annotations

import json
import os
import zlib
from typing import Any

import pytest

from drivetrain.checkpoint.manifest import (
    DamagedCheckpoint,
    File,
    Manifest,
    checksum,
    fingerprint,
    folder_name,
)
from tests.checkpoint.parts import changed


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("step", -1), ("step", 1.0), ("step", True), ("attempt", -1), ("attempt", "1")),
        *(("layout", []), ("layout", {"dp": -1}), ("strategy", None), ("position", [])),
        *(("contents", "all"), ("values", []), ("contract", None), ("versions", "1")),
        *(("created_s", -1), ("created_s", 1e11), ("created_s", "1"), ("created_s", None)),
        ("files", [{"name": "a/b", "size": 1, "crc32": "00000000"}]),
        ("files", [{"name": ".a", "size": 1, "crc32": "00000000"}]),
        ("files", [{"name": 5, "size": 1, "crc32": "00000000"}]),
        ("files", [{"name": "a", "size": -1, "crc32": "00000000"}]),
        ("files", [{"name": "a", "size": 1, "crc32": "0000000"}]),
        ("files", [{"name": "a", "size": 1, "crc32": 12345678}]),
    ],
)
def test_what_is_not_of_its_kind_is_named(key: str, value: Any) -> None:
    with pytest.raises(DamagedCheckpoint) as caught:
        Manifest.from_json(changed(**{key: value}))
    assert str(caught.value) == (f"manifest.json is not valid ({key} has an invalid value)")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("step", 0), ("attempt", 0), ("layout", {}), ("contents", "everything")),
        *(("contents", "trained"), ("contents", "weights"), ("created_s", 0)),
        *(("created_s", 9.9e10), ("files", [{"name": "a-1.b_c", "size": 0, "crc32": "00000000"}])),
    ],
)
def test_what_is_of_its_kind_is_read(key: str, value: Any) -> None:
    found = getattr(Manifest.from_json(changed(**{key: value})), key)
    assert found == ((File("a-1.b_c", 0, "00000000"),) if key == "files" else value)


def test_a_manifest_of_another_format_or_without_its_checksum_is_refused() -> None:
    with pytest.raises(
        DamagedCheckpoint, match="^manifest.json has format 3; this release reads 1 and 2$"
    ):
        Manifest.from_json(changed(format=3))
    body = json.loads(changed())
    del body["self_crc32"]
    with pytest.raises(DamagedCheckpoint, match=r"^manifest.json cannot be read \('self_crc32'\)$"):
        Manifest.from_json(json.dumps(body).encode())
    with pytest.raises(DamagedCheckpoint, match="^manifest.json does not match its own checksum$"):
        Manifest.from_json(json.dumps({**body, "self_crc32": "00000000"}).encode())
    for wrong in (b"{", b"[]", b"5"):
        with pytest.raises(DamagedCheckpoint, match="^manifest.json cannot be read"):
            Manifest.from_json(wrong)
    with pytest.raises(DamagedCheckpoint, match="is not valid"):
        Manifest.from_json(changed(more=1))


def test_a_manifest_is_written_for_people_too_and_begins_with_its_format() -> None:
    text = Manifest(4, 1, {"dp": 2}, "ddp", {}).to_json().decode()
    assert text.startswith('{\n "format": 1,\n "step": 4,\n "attempt": 1,\n')
    assert list(json.loads(text))[-1] == "self_crc32"


def test_checksums_are_eight_digits_whatever_the_order_of_keys() -> None:
    assert checksum(b"") == "00000000"
    assert checksum(b"abc") == f"{zlib.crc32(b'abc'):08x}" == "352441c2"
    assert (
        fingerprint({"a": 1, "b": 2})
        == fingerprint({"b": 2, "a": 1})
        == checksum(b'{"a": 1, "b": 2}')
    )
    assert folder_name(4, 12) == "step-000000004-a12"
    assert os.path.basename(folder_name(1234567890, 1)) == "step-1234567890-a1"

"""Incremental checkpoints on ranks: the same bits as full ones, at any layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from drivetrain.checkpoint import catalogue
from drivetrain.checkpoint.catalogue import Entry
from drivetrain.checkpoint.locate import locate
from drivetrain.testing import run_ranks
from tests.ranks.test_trained_only import FSDP, train

pytestmark = pytest.mark.slow
LAYOUTS: dict[str, dict[str, Any]] = {"ddp": {}, "fsdp": FSDP}
WHAT: dict[str, Any] = {"contents": "everything", "keep_last": 2}
WAYS: dict[str, dict[str, Any]] = {"full": WHAT, "incremental": {**WHAT, "incremental": True}}


def on_two(output_dir: str) -> dict[str, str]:
    """Stopped after step 5, of which 4 is saved; one resumes here, the other elsewhere."""
    found = {}
    for name, parallel in LAYOUTS.items():
        found[f"{name} whole"] = train(f"{output_dir}/{name}-whole", parallel, **WHAT)
        train(f"{output_dir}/{name}", parallel, stops=5, **WAYS["incremental"])
        found[name] = train(f"{output_dir}/{name}", parallel, **WAYS["incremental"])
    for way, checkpoint in WAYS.items():
        train(f"{output_dir}/moved-{way}", FSDP, stops=5, **checkpoint)
    train(f"{output_dir}/rank-0", FSDP, save="full", **WAYS["incremental"])
    return found


def on_one(output_dir: str) -> dict[str, str]:
    return {
        way: train(f"{output_dir}/moved-{way}", {}, **checkpoint)
        for way, checkpoint in WAYS.items()
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    path = tmp_path_factory.mktemp("runs")
    two = run_ranks(on_two, 2, 120, args=(str(path),))[0]
    return path, {**two, **run_ranks(on_one, 1, 120, args=(str(path),))[0]}


def test_a_killed_run_goes_on_to_the_last_bit(found: tuple[Path, dict[str, str]]) -> None:
    for name in LAYOUTS:
        assert found[1][name] == found[1][f"{name} whole"] != ""


def test_on_another_number_of_ranks_it_goes_on_as_from_a_full_one(
    found: tuple[Path, dict[str, str]],
) -> None:
    assert found[1]["incremental"] == found[1]["full"] != ""


def good(run: Path) -> list[Entry]:
    located = locate(str(run))
    entries = located.entries()
    assert {entry.state for entry in entries} <= {"good", "base"}
    for entry in entries:
        if entry.manifest is not None:
            catalogue.verify(located.storage, entry.folder)
    return [entry for entry in entries if entry.manifest is not None]


@pytest.mark.parametrize(("name", "ranks"), [("ddp", 2), ("fsdp", 2), ("rank-0", 1)])
def test_ranks_refer_to_files_of_their_own_run(
    found: tuple[Path, dict[str, str]], name: str, ranks: int
) -> None:
    entries = good(found[0] / name)
    assert [entry.step for entry in entries] == [8, 6]
    for entry in entries:
        assert len(entry.refers_to) >= ranks
        assert all(path.startswith("step-") for path in entry.refers_to)


def test_pieces_of_another_layout_are_written_anew(found: tuple[Path, dict[str, str]]) -> None:
    newest, other = good(found[0] / "moved-incremental")
    assert (newest.step, other.step) == (8, 6)
    assert other.refers_to == ()


def test_events_say_what_was_written(found: tuple[Path, dict[str, str]]) -> None:
    (newest, _) = good(found[0] / "fsdp")
    assert newest.manifest is not None
    for rank in range(2):
        text = (found[0] / "fsdp" / "events" / f"{rank:05d}.jsonl").read_text()
        events = [json.loads(line) for line in text.splitlines()]
        fields = [each["fields"] for each in events if each.get("name") == "saved"]
        said = {each["step"]: (each["written_bytes"], each["referred_bytes"]) for each in fields}
        assert said[8] == (newest.manifest.num_bytes, newest.manifest.num_referred_bytes)
        assert said[2][1] == 0 < said[8][1]
        assert said[8][0] < said[2][0]

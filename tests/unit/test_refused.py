"""Places that nobody may write to, and stores without credentials: mistakes, not bad luck.

Tried again they would end the same way, so they have the exit code of a wrong environment, which is
never retried, and one sentence.
"""

from __future__ import annotations

import errno
import os
import uuid
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from drivetrain.checkpoint.storage import LocalStorage
from drivetrain.core.errors import EnvironmentProblem
from drivetrain.launch.guardian import guard
from drivetrain.record.run_directory import RunDirectory
from drivetrain.supervise.policy import Budgets, End, EndKind, decide
from drivetrain.train.trainer import Trainer
from tests.ranks.resuming import go_on_in
from tests.ranks.small_task import samples, small_task


class NoCredentialsError(Exception):
    """As botocore has it: by name, since the library need not be there."""


class Locked(MemoryFileSystem):  # type: ignore[misc]
    """A store that does not know who is asking."""

    protocol = "locked"
    error: Exception = NoCredentialsError("Unable to locate credentials")

    def ls(self, path: str, **more: Any) -> Any:
        raise self.error


def train(run: Path, monkeypatch: pytest.MonkeyPatch, directory: str | None = None) -> None:
    go_on_in(run, monkeypatch)
    config = {
        "global_batch_size": 8,
        "max_steps": 2,
        "checkpoint": {"every_steps": 1, "directory": directory},
        "record": {"progress": "none", "sinks": []},
    }
    Trainer(small_task(8), config).fit(samples())


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR])
def test_checkpoints_that_nobody_may_write_are_a_mistake(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: LocalStorage, name: str, data: bytes) -> bool:
        raise OSError(code, os.strerror(code), name)

    monkeypatch.setattr(LocalStorage, "create", refuse)
    said = rf"checkpoint.directory = .*: {os.strerror(code)}.*; choose a place you can write to"
    with pytest.raises(EnvironmentProblem, match=said):
        train(tmp_path / "run", monkeypatch)


def test_trouble_of_the_storage_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: LocalStorage, name: str, data: bytes) -> bool:
        raise OSError(errno.EIO, os.strerror(errno.EIO), name)

    monkeypatch.setattr(LocalStorage, "create", fail)
    with pytest.raises(OSError, match="Input/output error"):
        train(tmp_path / "run", monkeypatch)


@pytest.mark.parametrize(
    "error",
    [
        NoCredentialsError("Unable to locate credentials"),
        PermissionError("Access Denied"),
        type("TokenRetrievalError", (Exception,), {})("the token has expired"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_store_without_credentials_is_a_mistake(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsspec.register_implementation("locked", Locked, clobber=True)
    monkeypatch.setattr(Locked, "error", error)
    with pytest.raises(EnvironmentProblem, match=f"checkpoint.directory = locked://.*{error}"):
        train(tmp_path / "run", monkeypatch, f"locked://bucket/{uuid.uuid4().hex}")


def test_a_run_directory_that_is_read_only_is_refused_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)  # noqa: ARG005
    with pytest.raises(EnvironmentProblem):
        RunDirectory.at(tmp_path / "run")
    assert guard([f"--run-dir={tmp_path / 'run'}", "script.py"]) == 4
    said = capfd.readouterr().err
    assert said.startswith("--run-dir = ")
    assert said.endswith(": not writable; give a folder you may write to\n")
    assert said.count("\n") == 1


def test_a_lock_that_cannot_be_made_is_refused_in_one_sentence(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run" / "launcher.lock").mkdir(parents=True)
    assert guard([f"--run-dir={tmp_path / 'run'}", "script.py"]) == 4
    assert capfd.readouterr().err.endswith("Is a directory; give a folder you may write to\n")


def test_it_is_not_tried_again() -> None:
    end = End(EndKind.START_UP, 0, EnvironmentProblem.exit_code)
    assert not decide(end, [End(EndKind.FAILED, 5)], Budgets()).restart

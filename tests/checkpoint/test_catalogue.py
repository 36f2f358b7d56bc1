"""Where checkpoints are looked for, and which are found."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.checkpoint import catalogue, lineage
from drivetrain.checkpoint.access import refusals_named
from drivetrain.checkpoint.locate import damaged, locate
from drivetrain.checkpoint.manifest import NAME, DamagedCheckpoint, folder_name
from drivetrain.checkpoint.storage import LocalStorage
from drivetrain.core.errors import ConfigError, DamagedRun, DrivetrainError, EnvironmentProblem
from tests.checkpoint.parts import DATA, written


def named(error: Exception) -> str:
    with pytest.raises(EnvironmentProblem) as caught, refusals_named("s3://bucket/run"):
        raise error
    return str(caught.value)


REMEDY = "choose a place you can write to, or provide credentials for it"


def test_a_refusal_names_the_address_the_reason_and_what_to_do() -> None:
    refused = OSError(errno.EACCES, "Permission denied", "/some/file")
    where = "checkpoint.directory = s3://bucket/run"
    assert named(refused) == f"{where}: Permission denied; {REMEDY}"
    assert (
        named(PermissionError("Access Denied\nrequest 17")) == f"{where}: Access Denied; {REMEDY}"
    )
    assert named(PermissionError()) == f"{where}: PermissionError; {REMEDY}"


@pytest.mark.parametrize(
    "name",
    [
        "NoCredentialsError",
        "PartialCredentialsError",
        "CredentialRetrievalError",
        "TokenRetrievalError",
        "UnauthorizedSSOTokenError",
        "ProfileNotFound",
        "DefaultCredentialsError",
        "RefreshError",
        "ClientAuthenticationError",
    ],
)
def test_stores_without_credentials_are_known_by_the_name_of_their_error(name: str) -> None:
    kind = type(name, (Exception,), {})
    assert ": who are you?; " in named(kind("who are you?"))
    assert ": who are you?; " in named(type("Its", (kind,), {})("who are you?"))


@pytest.mark.parametrize("error", [OSError(errno.EIO, "bad"), ValueError("x"), KeyError("x")])
def test_other_trouble_stays_what_it_is(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, refusals_named("a"):
        raise error
    assert caught.value is error


def test_a_manifest_that_is_too_large_is_none_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, manifest = written(tmp_path, {"a": torch.ones(2)})
    size = storage.size(f"{manifest.folder}/{NAME}")
    assert size is not None
    monkeypatch.setattr(catalogue, "_MOST_MANIFEST_BYTES", size)
    assert catalogue.read_manifest(storage, manifest.folder) == manifest
    monkeypatch.setattr(catalogue, "_MOST_MANIFEST_BYTES", size - 1)
    with pytest.raises(
        DamagedCheckpoint, match=r"^manifest.json was not written by Drivetrain \(.+\)"
    ):
        catalogue.read_manifest(storage, manifest.folder)


def test_of_several_strangers_the_first_is_named(tmp_path: Path) -> None:
    storage, manifest = written(tmp_path, {"a": torch.ones(2)})
    for name in ("z.bin", "b.bin"):
        storage.put(f"{manifest.folder}/{name}", b"")
    with pytest.raises(DamagedCheckpoint, match=r"^b\.bin is not in the manifest$"):
        catalogue.verify(storage, manifest.folder)


def test_what_cannot_be_read_is_no_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, manifest = written(tmp_path, {"a": torch.ones(2)})
    read = storage.read

    def fails(name: str, *args: Any, **more: Any) -> bytes:
        if name.endswith(DATA):
            raise OSError(errno.EIO, "Input/output error")
        return read(name, *args, **more)

    monkeypatch.setattr(storage, "read", fails)
    words = r"^cannot be read \(\[Errno 5\] Input/output error\)$"
    with pytest.raises(DamagedCheckpoint, match=words):
        catalogue.verify(storage, manifest.folder)


def test_sizes_are_checked_unless_somebody_has_already(tmp_path: Path) -> None:
    storage, manifest = written(tmp_path, {"a": torch.ones(2)})
    assert [entry.state for entry in catalogue.entries(storage)] == ["good"]
    storage.put(f"{manifest.folder}/{DATA}", b"x" * 1234)
    (entry,) = catalogue.entries(storage)
    assert (entry.state, entry.step, entry.attempt) == ("damaged", 4, 1)
    assert entry.problem == f"{DATA} has 1,234 bytes, not 8"
    assert entry.manifest is None
    (unchecked,) = catalogue.entries(storage, check_sizes=False)
    assert unchecked.manifest == manifest
    assert unchecked.problem == ""


def test_entries_come_newest_first_and_say_why_they_do_not_count(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    lineage.claim_next(storage, 0)
    for step in (4, 12):
        written(tmp_path, {"a": torch.ones(2)}, step=step)
    (tmp_path / folder_name(8, 1)).mkdir()
    lineage.claim_next(storage, 4)
    found = [(entry.step, entry.state, entry.problem) for entry in catalogue.entries(storage)]
    assert found == [
        (12, "replaced", "written by an attempt that another one had replaced"),
        (8, "unfinished", "no manifest.json: the save did not finish"),
        (4, "good", ""),
    ]


def test_checkpoints_are_found_wherever_one_points(tmp_path: Path) -> None:
    run = tmp_path / "run"
    _, manifest = written(run / "checkpoints", {"a": torch.ones(1)}, step=4)
    written(run / "checkpoints", {"a": torch.ones(1)}, step=8)
    for address in (run, run / "checkpoints", f"{run}/"):
        found = locate(str(address))
        assert found.storage.address == str(run / "checkpoints")
        assert found.folder is None
        assert [each.step for each in found.entries()] == [8, 4]
        assert found.choose().step == 8
        assert found.choose(4).step == 4
    for address in (run / "checkpoints" / manifest.folder, f"{run}/checkpoints/{manifest.folder}/"):
        one = locate(str(address))
        assert one.folder == manifest.folder
        assert [each.step for each in one.entries()] == [4]
        assert one.choose().step == 4
    config = {"config": {"checkpoint": {"directory": str(run / "checkpoints")}}}
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/run.yaml").write_text(json.dumps(config))
    assert locate(str(tmp_path / "elsewhere")).storage.address == str(run / "checkpoints")


def test_a_checkpoint_of_the_working_directory_is_found_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, manifest = written(tmp_path, {"a": torch.ones(1)})
    monkeypatch.chdir(tmp_path)
    found = locate(manifest.folder)
    assert (found.storage.address, found.folder) == (str(tmp_path), manifest.folder)


def test_where_there_are_none_it_is_said_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        locate(str(tmp_path)[-20:])
    assert str(caught.value) == (
        f"checkpoints = {str(tmp_path)[-20:]}: no checkpoints found; give a run's directory, a "
        "folder of checkpoints, one checkpoint, or an address like s3://bucket/run"
    )
    (tmp_path / "run.yaml").write_text('{"config": {"checkpoint": {"directory": null}}}')
    with pytest.raises(ConfigError, match="no checkpoints found"):
        locate(str(tmp_path))
    (tmp_path / "run.yaml").write_text("config: 5")
    with pytest.raises(DamagedRun) as broken:
        locate(str(tmp_path))
    assert str(broken.value).startswith(f"{tmp_path}/run.yaml: does not name a checkpoint folder (")


def test_a_step_that_is_not_there_is_answered_with_those_that_are(tmp_path: Path) -> None:
    for step in (8, 4):
        written(tmp_path, {"a": torch.ones(1)}, step=step)
    with pytest.raises(ConfigError) as caught:
        locate(str(tmp_path)).choose(6)
    assert str(caught.value) == (
        f"--step = 6: {tmp_path} has no checkpoint for this step; choose one of 4, 8"
    )
    assert str(damaged("step-4", "x is missing")) == (
        "step-4: x is missing; run `drivetrain checkpoint verify` to find the good ones, and "
        "choose one with --step"
    )


def test_the_newest_good_one_is_chosen_and_of_none_the_newest_is_named(tmp_path: Path) -> None:
    written(tmp_path, {"a": torch.ones(1)}, step=4)
    storage, newest = written(tmp_path, {"a": torch.ones(1)}, step=8)
    storage.put(f"{newest.folder}/{DATA}", b"")
    assert locate(str(tmp_path)).choose().step == 4
    with pytest.raises(DrivetrainError, match=f"^{newest.folder}: {DATA} has 0 bytes, not 4; "):
        locate(str(tmp_path)).choose(8)


@pytest.mark.parametrize(
    "values", [{}, {"common": {"run": {"value": 5}}}, {"common": {"run": {"value": {}}}}]
)
def test_the_best_step_is_what_the_newest_checkpoint_says(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    known = {"common": {"run": {"value": {"best_step": 4}}}}
    written(tmp_path / "known", {"a": torch.ones(1)}, step=8, values=known)
    assert locate(str(tmp_path / "known")).best_step() == 4
    written(tmp_path / "not", {"a": torch.ones(1)}, step=8, values=values)
    with pytest.raises(ConfigError) as caught:
        locate(str(tmp_path / "not")).best_step()
    assert str(caught.value) == (
        f"--best: no evaluation of {tmp_path}/not was marked as best; train with "
        "checkpoint.keep_best, or give --step"
    )

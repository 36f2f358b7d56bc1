"""A damaged run ends in a sentence, whichever verb reads it; others beside it are still shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from drivetrain.cli.main import app
from drivetrain.core.bounded import parse_yaml, read_bytes
from drivetrain.core.errors import DamagedRun
from drivetrain.record import RunDirectory
from tests.security.damage import BOMB, DAMAGES, NO_FILES, VERBS, outcome, readers, small_run


def test_the_run_is_good_before_anything_is_done_to_it(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    found = {verb: outcome(verb, run) for verb in VERBS}
    good = dict.fromkeys(VERBS, "exit code 0")
    good |= {"diagnose": "exit code 1", "checkpoint verify": "exit code 1"}
    config = found.pop("config")
    assert "global_batch_size: required" in config  # a run.yaml by hand says little
    good.pop("config")
    assert found == good


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", DAMAGES)
def test_every_verb_ends_in_a_sentence(tmp_path: Path, name: str) -> None:
    run = small_run(tmp_path / "run")
    DAMAGES[name](run)
    for verb in VERBS:
        said = outcome(verb, run)
        assert len(said.splitlines()) < 20, said
        assert "Traceback" not in said


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name",
    [
        name
        if name.startswith(("pipe", "endless"))
        else pytest.param(name, marks=[pytest.mark.slow, pytest.mark.long])
        for name in NO_FILES
    ],
)
def test_what_is_no_file_is_not_waited_for(tmp_path: Path, name: str) -> None:
    run = small_run(tmp_path / "run")
    NO_FILES[name](run)
    for verb in readers(name):
        assert "Traceback" not in outcome(verb, run)


def test_one_bad_run_does_not_hide_the_others(tmp_path: Path) -> None:
    small_run(tmp_path / "good")
    bad = small_run(tmp_path / "bad")
    DAMAGES["garbage steps"](bad)
    result = CliRunner().invoke(app, ["runs", str(tmp_path)])
    assert result.exit_code == 0
    assert "good" in result.output
    assert "damaged" in result.output
    listed = json.loads(CliRunner().invoke(app, ["runs", str(tmp_path), "--json"]).output)
    assert {each["name"]: each["state"] for each in listed} == {"good": "failed", "bad": "damaged"}
    assert "events/00000.steps" in next(e["reason"] for e in listed if e["name"] == "bad")


def test_one_bad_job_does_not_hide_the_others(tmp_path: Path) -> None:
    small_run(tmp_path / "good")
    DAMAGES["a job of wrong types"](small_run(tmp_path / "bad"))
    result = CliRunner().invoke(app, ["jobs", str(tmp_path)])
    assert result.exit_code == 0
    assert str(tmp_path / "good") in result.output
    assert "damaged" in result.output


def _jobs_with(folder: Path, monkeypatch: pytest.MonkeyPatch, squeue: str) -> str:
    """What `jobs` says of the second of three, where squeue does this."""
    tool = folder / "bin" / "squeue"
    tool.parent.mkdir(exist_ok=True)
    tool.write_text(f"#!/bin/sh\n{squeue}\n")
    tool.chmod(0o755)
    with monkeypatch.context() as changed:
        changed.setenv("PATH", f"{tool.parent}:/bin:/usr/bin")
        return CliRunner().invoke(app, ["jobs", str(folder)]).output.splitlines()[1]


def test_a_cluster_that_does_not_answer_does_not_hide_the_other_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a-good", "c-good"):
        small_run(tmp_path / name)
    far = small_run(tmp_path / "b-far")
    job = json.loads((far / "job.json").read_text())
    (far / "job.json").write_text(json.dumps({**job, "target": {"name": "slurm"}, "id": "7"}))
    said = _jobs_with(
        tmp_path, monkeypatch, "echo 'slurm_load_jobs error: no controller' >&2; false"
    )
    assert said.startswith("unreachable")
    assert "no controller" in said
    gone = _jobs_with(
        tmp_path, monkeypatch, "echo 'slurm error: Invalid job id specified' >&2; false"
    )
    assert "no longer knows job 7" in gone
    monkeypatch.setenv("PATH", str(tmp_path))  # no squeue on it
    result = CliRunner().invoke(app, ["jobs", str(tmp_path)])
    assert result.exit_code == 0
    rows = result.output.splitlines()
    assert [row.split()[1].rpartition("/")[2] for row in rows] == ["a-good", "b-far", "c-good"]
    assert rows[1].startswith("unreachable")
    assert "squeue" in rows[1]
    alone = CliRunner().invoke(app, ["jobs", str(far)])
    assert alone.exit_code != 0


def test_a_run_that_goes_on_is_numbered_after_good_attempts(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    for name in ("9" * 20, "1x", "٣", "99999"):
        (run / "attempts" / name).mkdir()
    assert RunDirectory.at(run).next_attempt() == 2


def test_files_are_read_only_as_far_as_asked(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    assert read_bytes(path) == b"0123456789"
    assert read_bytes(path, 3, 4) == b"3456"
    assert read_bytes(path, 8, 4) == b"89"
    assert read_bytes(path, 20) == b""
    with pytest.raises(DamagedRun, match="but at most 4 B are read"):
        read_bytes(path, most=4)


def test_yaml_stays_as_small_as_it_looks() -> None:
    assert parse_yaml("a: &x {b: 1}\nc: *x\n") == {"a": {"b": 1}, "c": {"b": 1}}
    with pytest.raises(ValueError, match="more than 20,000 values"):
        parse_yaml(BOMB)
    with pytest.raises(ValueError, match="refers to itself"):
        parse_yaml("a: &x [*x]")

"""Names that would become lines of a script, or of a shell, are refused on every target."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from drivetrain.launch.targets.hosts import SshHosts
from drivetrain.launch.targets.local import Local
from drivetrain.launch.targets.ray import Ray
from drivetrain.launch.targets.slurm import Slurm
from tests.kubernetes.jobs import CPU_JOB, CPU_TARGET


def problems(target: Any, tmp_path: Path, **changes: Any) -> set[str]:
    (tmp_path / "train.py").touch()
    (tmp_path / "hosts").write_text("a\nb\n")
    if isinstance(target, SshHosts):
        target = dataclasses.replace(target, hosts=str(tmp_path / "hosts"))
    nodes = 1 if isinstance(target, Local) else 2
    plain = dataclasses.replace(
        CPU_JOB, working_dir=str(tmp_path), num_nodes=nodes, max_nodes=nodes
    )
    assert target.problems(plain) == []
    return {each.where for each in target.problems(dataclasses.replace(plain, **changes))}


TARGETS = (Slurm(), SshHosts(), Local(), Ray(), CPU_TARGET)
NAMED = [type(target).__name__ for target in TARGETS]


@pytest.mark.parametrize("name", ["A;touch x", "A B", "A\nB", "$(id)", "1A", "", "A=`id`"])
@pytest.mark.parametrize("target", TARGETS, ids=NAMED)
def test_a_variable_whose_name_is_none_is_refused(name: str, target: Any, tmp_path: Path) -> None:
    assert problems(target, tmp_path, environment=((name, "1"),)) == {"--env"}


@pytest.mark.parametrize("name", ["a\ntouch x", "a\rb", "a b", "$(id)", "a;b", "`id`", "a\x00b"])
def test_a_job_name_that_slurm_would_read_as_more_is_refused(name: str, tmp_path: Path) -> None:
    assert problems(Slurm(), tmp_path, name=name) == {"--job-name"}


@pytest.mark.parametrize("flag", ["partition", "account", "mem", "nodelist", "sbatch"])
def test_a_line_break_in_a_directive_is_refused(flag: str, tmp_path: Path) -> None:
    value: Any = ("--mail-type=END\ntouch x",) if flag == "sbatch" else "main\ntouch x"
    given: dict[str, Any] = {flag: value}
    target = dataclasses.replace(Slurm(), **given)
    assert [each.where for each in target.problems(CPU_JOB)][-1:] == [f"--{flag}"]


def test_a_line_break_in_the_runs_directory_is_refused(tmp_path: Path) -> None:
    assert problems(Slurm(), tmp_path, run_dir="/runs/a\ntouch x") == {"--run-dir"}

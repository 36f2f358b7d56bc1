"""`drivetrain train --on TARGET --help`: every flag of the target, and how to get there."""

from __future__ import annotations

import dataclasses

import pytest
from typer.testing import CliRunner

from drivetrain.cli.main import app
from drivetrain.core.errors import ConfigError
from drivetrain.launch.request import read_command, read_request
from drivetrain.launch.target import TARGETS, target_type


def said(*words: str) -> str:
    done = CliRunner().invoke(app, ["train", *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize("name", TARGETS.names)
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_each_targets_flags_are_listed_with_what_they_mean(name: str, flag: str) -> None:
    text = said("--on", name, flag)
    for field in dataclasses.fields(target_type(name)):
        assert f"--{field.name.replace('_', '-')}" in text
        assert field.metadata["help"].split()[0] in text
    assert "drivetrain train --help" in text


def test_help_may_come_first_and_with_other_flags() -> None:
    assert said("--on=slurm", "--nodes", "2", "--help") == said("--on", "slurm", "--help")
    assert "--ssh" in said("--hosts", "file", "--help")
    assert "--partition" in said("--help", "--on", "slurm")


def test_the_general_help_says_where_the_targets_flags_are() -> None:
    text = said("--help")
    assert "--on TARGET --help" in text
    assert said("--nproc-per-node", "2", "--help") == text
    assert said("--plan", "auto", "--help") == text


def test_nothing_at_all_is_answered_by_a_sentence() -> None:
    with pytest.raises(ConfigError, match="SCRIPT: not given"):
        read_request([]) or read_command([])


def test_an_unknown_target_is_named() -> None:
    with pytest.raises(ConfigError, match="did you mean kubernetes"):
        said("--on", "kubernets", "--help")

"""A run's curve against those of other seeds."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from drivetrain.cli.verify import verify_curve, write_curve
from drivetrain.core.errors import ConfigError, DrivetrainError
from drivetrain.verify import curve
from tests.support.evaluated import write_evaluations

STEPS = (10, 20, 30)


def recorded(folder: Path, values: list[float], steps: tuple[int, ...] = STEPS) -> str:
    write_evaluations(folder, zip(steps, values, strict=True))
    return str(folder)


@pytest.mark.parametrize(
    ("level", "degrees", "table"),
    [
        (0.975, 1, 12.706),
        (0.975, 2, 4.303),
        (0.995, 4, 4.604),
        (0.9995, 3, 12.924),
        (0.975, 30, 2.042),
        (0.995, 7, 3.499),
    ],
)
def test_quantiles_are_those_of_the_tables(level: float, degrees: int, table: float) -> None:
    assert curve._t_quantile(level, degrees) == pytest.approx(table, abs=6e-4)


def test_one_more_seed_is_refused_about_once_in_a_hundred_times() -> None:
    chance, refused, rounds = random.Random(3), 0, 4000  # noqa: S311 - no secret
    for _ in range(rounds):
        columns = [[chance.gauss(0, 1) for _ in range(4)] for _ in STEPS]
        intervals = [curve.prediction_interval(column, len(STEPS)) for column in columns]
        refused += any(not low <= chance.gauss(0, 1) <= high for low, high in intervals)
    assert 0.005 < refused / rounds < 0.015


def test_a_run_is_held_against_the_seeds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [recorded(tmp_path / f"{n}", [2 + n / 50, 1 + n / 50, 0.5 + n / 50]) for n in range(3)]
    file = str(tmp_path / "curve.json")
    write_curve(runs, "val/loss", file)
    good, bad = [2.01, 1.03, 0.51], [2.01, 1.03, 0.95]
    assert verify_curve([recorded(tmp_path / "good", good)], file) == 0
    assert "as expected" in capsys.readouterr().out
    assert verify_curve([recorded(tmp_path / "bad", bad)], file) == 1
    assert "different curve: 1 of 3 values are outside the interval" in capsys.readouterr().out
    assert verify_curve([recorded(tmp_path / "nan", [2.0, float("nan"), 0.5])], file) == 1
    elsewhere = recorded(tmp_path / "elsewhere", good, (10, 20, 40))
    with pytest.raises(ConfigError, match="has no val/loss at step 30"):
        verify_curve([elsewhere], file)
    with pytest.raises(ConfigError, match="at different steps than"):
        curve.collect([*runs, elsewhere], "val/loss")


def test_the_command_ends_with_the_verdict(tmp_path: Path) -> None:
    runs = [recorded(tmp_path / f"{n}", [2 + n / 50, 1 + n / 50, 0.5 + n / 50]) for n in range(3)]
    bad, file = recorded(tmp_path / "bad", [2.0, 9.0, 0.5]), str(tmp_path / "curve.json")
    command = [sys.executable, "-m", "drivetrain", "verify", "curve"]
    for words, code in (
        ([*runs, "--write", file], 0),
        ([runs[0], "--expected", file], 0),
        ([bad, "--expected", file], 1),
    ):
        done = subprocess.run([*command, *words], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (code, ""), done.stdout


def test_what_says_too_little_is_refused(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", [1.0, 1.0, 1.0])
    with pytest.raises(ConfigError, match="2 runs are too few to show how seeds differ"):
        curve.collect([run, run], "val/loss")
    with pytest.raises(ConfigError, match="has no val/accuracy"):
        curve.collect([run] * 3, "val/accuracy")
    file = tmp_path / "curve.json"
    for text in ("{", "[]", '{"metric": "val/loss", "steps": [1], "curves": [[1.0]]}'):
        file.write_text(text)
        with pytest.raises(DrivetrainError, match=r"--expected|not JSON"):
            curve.read(str(file))

"""A parameter's best value for a larger model, from studies of smaller ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from drivetrain.cli.predicting import predict
from drivetrain.core.errors import ConfigError
from drivetrain.tune import scaling
from drivetrain.tune.journal import Asked, Ended, Journal
from drivetrain.tune.settings import Settings, open_study
from drivetrain.tune.space import Choice, Float, Space

RATE = "optimization.learning_rate"
SPACE = Space({RATE: Float(1e-4, 1e-1, log=True), "seed": Choice((1, 2))})


def best_at(size: float) -> float:
    return float(0.5 * size**-0.75)


def loss_of(rate: float, size: float) -> float:
    """A parabola in the rate's logarithm, and steeper far away on the right."""
    far = math.log(rate / best_at(size))
    return 1.0 + 0.1 * far**2 + max(0.0, far - 2) ** 3


def rates(low: float = 1e-4, high: float = 1e-1, num: int = 12) -> list[float]:
    return [low * (high / low) ** (each / (num - 1)) for each in range(num)]


def optima(sizes: Sequence[float]) -> list[scaling.Optimum]:
    return [scaling.optimum(s, [(r, loss_of(r, s)) for r in rates()]) for s in sizes]


def write(folder: Path, size: float, tried: Sequence[float], **changes: Any) -> str:
    study = open_study(folder / f"w{size}", Settings("t.py", (), len(tried), **changes), SPACE)
    sign = -1 if changes.get("mode") == "max" else 1
    journal = Journal(study.path)
    for trial, rate in enumerate(tried):
        journal.write(Asked(trial, {RATE: rate, "seed": 1}))
        journal.write(Ended(trial, 0, "done", 9, sign * loss_of(rate, size)))
    return f"{study.path}:{size}"


def test_a_planted_law_is_found_and_holds_for_a_size_nobody_searched() -> None:
    found = optima((64, 128, 256))
    for each in found:
        assert each.value == pytest.approx(best_at(each.size), rel=0.02)
    law = scaling.fit(found)
    assert law.exponent == pytest.approx(-0.75, abs=0.02)
    assert law.at(1024) == pytest.approx(best_at(1024), rel=0.05)
    largest, expected = scaling.held_out(found)
    assert largest.size == 256
    assert scaling.factor_off(largest.value, expected) < 1.05


def test_an_optimum_beyond_what_was_searched_is_marked() -> None:
    below = [(rate, loss_of(rate, 64)) for rate in rates(high=best_at(64) / 3)]
    assert scaling.optimum(64, below).is_at_edge
    assert not optima([64])[0].is_at_edge


@pytest.mark.parametrize("mode", ["min", "max"])
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], mode: str) -> None:
    words = [write(tmp_path, size, rates(), mode=mode) for size in (256, 64, 128)]
    predict(words, 1024, RATE)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["64", "128", "256"]
    assert lines[4].startswith("fit: learning_rate = 0.")
    assert "size 256 from the smaller ones" in lines[5]
    assert lines[-1].startswith("for size 1024, 4.0 times the largest that was searched: ")
    assert float(lines[-1].rpartition("=")[2]) == pytest.approx(best_at(1024), rel=0.05)


def test_a_law_that_does_not_hold_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [write(tmp_path, size, rates()) for size in (64, 128)]
    (tmp_path / "other").mkdir()
    odd = write(tmp_path / "other", 1, rates())  # best at 0.5: at the edge of what was searched
    predict([*words, odd.replace(":1", ":256")], 512, RATE)
    said = capsys.readouterr().out
    assert "at the edge of the searched range: the optimum may be outside it" in said
    assert "too far off to rely on" in said


@pytest.mark.parametrize(
    ("words", "parameter", "message"),
    [
        (["w64"], RATE, "STUDY:SIZE = w64: not a study with its size"),
        (["{w64}:big"], RATE, "not a study with its size"),
        (["{w64}:64", "{w64}:128"], RATE, "nothing is left to check the fit"),
        (["{w64}:64", "{w64}:64", "{w64}:128"], RATE, "two studies have the same size"),
        (["{w64}:64"], "seed", "did not search it, or not over numbers above 0"),
        (["{few}:64"], RATE, "only 4 of its trials finished; needs at least 5"),
    ],
)
def test_what_cannot_be_predicted_from_is_refused(
    tmp_path: Path, words: list[str], parameter: str, message: str
) -> None:
    folders = {"w64": write(tmp_path, 64, rates()), "few": write(tmp_path, 2, rates(num=4))}
    named = {name: found.rpartition(":")[0] for name, found in folders.items()}
    with pytest.raises(ConfigError, match=message):
        predict([word.format(**named) for word in words], 512, parameter)

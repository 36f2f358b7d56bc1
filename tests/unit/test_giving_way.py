"""Settings of a script that do not fit a check of it give way; nothing else does."""

from __future__ import annotations

from typing import Any

import pytest

from drivetrain.config.giving_way import FORCED, forced_by, gave_way
from drivetrain.config.load import load_config
from drivetrain.config.provenance import ResolvedConfig
from drivetrain.core.errors import ConfigError

DEFAULTS: dict[str, Any] = {
    "global_batch_size": 8,
    "max_steps": 1000,
    "checkpoint": {"keep_best": "accuracy", "every_steps": 100},
    "optimization": {"lr_scheduler_type": "wsd", "warmup_steps": 50, "decay_steps": 200},
}
SHORT = ("max_steps=10", "checkpoint.every_steps=null")


def load(*argv: str) -> ResolvedConfig:
    return load_config(argv=list(argv), defaults=DEFAULTS)


def test_without_a_check_they_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        load(*SHORT)
    assert {problem.where for problem in caught.value.problems} == {
        "checkpoint.keep_best",
        "optimization.warmup_steps",
        "optimization.decay_steps",
    }


def test_in_a_check_they_give_way_and_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FORCED, forced_by(SHORT)[FORCED])
    resolved = load(*SHORT)
    assert resolved.config.checkpoint.keep_best is None
    assert resolved.config.optimization.warmup_steps == 10
    assert resolved.config.optimization.decay_steps is None  # no step is left for it
    whys = gave_way({key: str(source) for key, source in resolved.sources.items()})
    assert whys == [
        ("checkpoint.keep_best", "instead of accuracy: this check saves nothing"),
        ("optimization.warmup_steps", "instead of 50: this check has 10 steps"),
        ("optimization.decay_steps", "instead of 200: this check has 10 steps"),
    ]


def test_a_decay_has_the_steps_after_the_warmup(monkeypatch: pytest.MonkeyPatch) -> None:
    longer = ("max_steps=80",)
    monkeypatch.setenv(FORCED, forced_by(longer)[FORCED])
    optimization = load(*longer).config.optimization
    assert (optimization.warmup_steps, optimization.decay_steps) == (50, 30)


def test_only_what_the_check_has_set_makes_them_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    saves = "checkpoint.every_steps=5"
    monkeypatch.setenv(FORCED, forced_by([saves])[FORCED])
    assert load(saves).config.checkpoint.keep_best == "accuracy"
    with pytest.raises(ConfigError, match="warmup_steps = 50: longer than the run"):
        load(saves, "max_steps=10")

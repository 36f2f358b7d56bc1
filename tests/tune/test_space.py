"""A space is held against the schema before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from drivetrain.core.errors import ConfigError
from drivetrain.tune.constraints import holds, keys_of
from drivetrain.tune.settings import Settings, open_study
from drivetrain.tune.space import Choice, Float, Int, Space, from_dict, read_space

YAML = """
parameters:
  optimization.learning_rate: {low: 1e-4, high: 1e-1, log: true}
  optimization.warmup_steps: {low: 0, high: 40, step: 10}
  optimization.optimizer: [adamw, sgd]
  optimization.momentum: {low: 0, high: 0.9, when: {optimization.optimizer: sgd}}
constraints: ["optimization.warmup_steps <= 1000 * optimization.learning_rate"]
"""


def test_yaml_and_python_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "space.yaml").write_text(YAML)
    (tmp_path / "space.py").write_text(
        "from drivetrain.tune.space import Choice, Float, Int, Space\n"
        "SPACE = Space({'optimization.learning_rate': Float(1e-4, 1e-1, log=True),\n"
        "  'optimization.warmup_steps': Int(0, 40, step=10),\n"
        "  'optimization.optimizer': Choice(('adamw', 'sgd')),\n"
        "  'optimization.momentum': Float(0.0, 0.9, when={'optimization.optimizer': ('sgd',)})},\n"
        "  ('optimization.warmup_steps <= 1000 * optimization.learning_rate',))\n"
    )
    space = read_space(tmp_path / "space.yaml")
    assert space == read_space(tmp_path / "space.py")
    assert space == from_dict(space.as_dict())
    assert isinstance(space.parameters["optimization.learning_rate"], Float)
    assert isinstance(space.parameters["optimization.warmup_steps"], Int)


def test_a_key_of_a_space_that_is_set_twice_is_named(tmp_path: Path) -> None:
    file = tmp_path / "space.yaml"
    file.write_text("parameters:\n  seed: {low: 1, high: 3}\n  seed: {low: 1, high: 9}\n")
    with pytest.raises(ConfigError, match="seed is set on line 2 and on line 3; remove one"):
        read_space(file)


def test_conditions_and_constraints() -> None:
    space = from_dict(__import__("yaml").safe_load(YAML))
    assert not space.is_active("optimization.momentum", {"optimization.optimizer": "adamw"})
    assert space.is_active("optimization.momentum", {"optimization.optimizer": "sgd"})
    values = {"optimization.learning_rate": 0.01, "optimization.warmup_steps": 10}
    assert space.allows(values)
    assert not space.allows({**values, "optimization.warmup_steps": 20})


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"optimization.lerning_rate": {"low": 0.1, "high": 1}}, "learning_rate?"),
        ({"optimization.learning_rate": {"low": -1.0, "high": 1}}, "greater than 0"),
        ({"optimization.warmup_steps": {"low": 0.5, "high": 3}}, "a whole number"),
        ({"optimization.optimizer": ["adamw", "adam"]}, "did you mean adamw?"),
        ({"optimization.momentum": {"low": 0.1, "high": 1.0}}, "less than 1"),
        ({"optimization.learning_rate": {"low": 0, "high": 1, "log": True}}, "must start above 0"),
        ({"optimization.learning_rate": {"low": 0.2, "high": 0.1}}, "low is above high"),
        ({"optimization.learning_rate": {"low": "x", "high": 0.1}}, "could not convert"),
        ({"optimization.learning_rate": {"hihg": 0.1, "low": 1}}, "has an unknown key, hihg"),
        ({"stop_at_step": [1, 2]}, "is set by the study"),
        (
            {"optimization.momentum": {"low": 0.1, "high": 0.2, "when": {"seed": 1}}},
            "seed is not a list of values before it",
        ),
        (
            {
                "optimization.optimizer": ["adamw", "sgd"],
                "optimization.momentum": {
                    "low": 0.1,
                    "high": 0.2,
                    "when": {"optimization.optimizer": "muon"},
                },
            },
            "optimizer is never muon",
        ),
    ],
)
def test_wrong_spaces_are_refused(parameters: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("?", r"\?")):
        from_dict({"parameters": parameters})


def test_whole_ends_of_a_number_that_need_not_be_whole() -> None:
    """They were taken for whole numbers, and only 0 and 1 were ever tried."""
    ends = {"low": 0, "high": 1}
    space = from_dict(
        {
            "parameters": {
                "optimization.weight_decay": ends,
                "optimization.max_grad_norm": {"low": 1, "high": 4},
                "optimization.warmup_steps": ends,
                "optimization.min_lr_ratio": {**ends, "type": "int"},
            }
        }
    )
    kinds = [type(parameter) for parameter in space.parameters.values()]
    assert kinds == [Float, Float, Int, Int]
    assert from_dict(space.as_dict()) == space


def test_all_problems_in_one_answer() -> None:
    with pytest.raises(ConfigError) as caught:
        Space({"seeed": Choice((1,)), "optimization.learning_rate": Float(-1.0, -2.0)}, ("a +",))
    assert len(caught.value.problems) >= 4


@pytest.mark.parametrize(
    "text",
    ["__import__('os')", "a.b()", "[1][0]", "(lambda: 1)()", "a if b else c", "a := 1", "2**9"],
)
def test_a_constraint_runs_no_code(text: str) -> None:
    with pytest.raises(ValueError, match=r"only keys|not an expression|not a config key"):
        keys_of(text)


def test_what_cannot_be_compared_is_said_before_a_trial_starts() -> None:
    space = {"parameters": {"seed": [1], "optimization.optimizer": ["sgd"]}}
    with pytest.raises(ConfigError, match="not supported between"):
        from_dict({**space, "constraints": ["optimization.optimizer < seed"]})
    with pytest.raises(ConfigError, match="max_steps is not searched"):
        from_dict({**space, "constraints": ["seed < max_steps"]})


def test_constraints_are_arithmetic() -> None:
    assert keys_of("a.b < c and not d == 2") == {"a.b", "c", "d"}
    assert holds("0 < a.b <= c % 4", {"a.b": 3, "c": 7})
    assert not holds("a / b > 1", {"a": 1, "b": 0})
    assert holds("a > b", {"a": 1})  # the trial has no b


def test_a_key_that_is_searched_is_not_given_as_well(tmp_path: Path) -> None:
    space = Space({"seed": Choice((1, 2))})
    with pytest.raises(ConfigError, match="^seed: is searched, and also set for every trial"):
        open_study(tmp_path, Settings("train.py", ("max_steps=4", "seed=3"), 2), space)
    assert not list(tmp_path.iterdir())

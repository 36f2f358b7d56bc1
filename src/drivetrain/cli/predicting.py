"""`drivetrain tune predict`: a parameter's best value for a larger model, from smaller ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from drivetrain.cli.say import say
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.tune import rows, scaling
from drivetrain.tune.scaling import FEWEST_SIZES, FEWEST_TRIALS, Optimum, factor_off
from drivetrain.tune.settings import Study, load_study
from drivetrain.tune.space import Float, Int, short_key

_FAR_OFF = 2.0
"""Factor by which the prediction of the held-out size may be off before a warning."""


def predict(words: Sequence[str], size: float, parameter: str) -> None:
    """Print the optimum at each size, the power law, the held-out error and the prediction."""
    if not 0 < size < math.inf:
        raise ConfigError([Problem("--for", "must be a size above 0", "--for 1024", size)])
    optima = sorted((_optimum(word, parameter) for word in words), key=lambda each: each.size)
    _check(optima)
    name = short_key(parameter)
    head = f"best {name}"
    say(f"{'size':>8}  {'trials':>6}  {head}  loss there")
    for each in optima:
        mark = (
            "  at the edge of the searched range: the optimum may be outside it" * each.is_at_edge
        )
        value = f"{each.value:.4g}".rjust(len(head))
        say(f"{each.size:>8g}  {each.num_trials:>6}  {value}  {each.loss:>10.4g}{mark}")
    law = scaling.fit(optima)
    say(f"fit: {name} = {law.factor:.4g} × size^{law.exponent:.3f}")
    largest, expected = scaling.held_out(optima)
    off = factor_off(largest.value, expected)
    say(
        f"held out: size {largest.size:g} from the smaller ones: {expected:.4g} predicted, "
        f"{largest.value:.4g} found, {off:.2f} times off"
    )
    if off > _FAR_OFF:
        say("too far off to rely on: run more trials at each size, or sizes closer to it")
    beyond = size / largest.size
    reach = f", {beyond:.1f} times the largest that was searched" if beyond > 1 else ""
    say(f"for size {size:g}{reach}: {parameter}={law.at(size):.4g}")


def _optimum(word: str, parameter: str) -> Optimum:
    folder, _, text = word.rpartition(":")
    try:
        size = float(text)
    except ValueError:
        size = math.nan
    if not folder or not 0 < size < math.inf:
        remedy = "write the study's directory and its size: studies/w64:64"
        raise ConfigError([Problem("STUDY:SIZE", "not a study with its size", remedy, word)])
    study = load_study(Path(folder))
    _check_parameter(study, parameter)
    sign = 1.0 if study.settings.mode == "min" else -1.0
    trials = [
        (float(row.values[parameter]), sign * row.value)  # type: ignore[arg-type]
        for row in rows.rows_of(study)
        if row.state == "done" and row.value is not None and parameter in row.values
    ]
    if len(trials) < FEWEST_TRIALS:
        rule = f"only {len(trials)} of its trials finished"
        raise ConfigError(
            [Problem(folder, rule, f"needs at least {FEWEST_TRIALS}", has_value=False)]
        )
    found = scaling.optimum(size, trials)
    return replace(found, loss=sign * found.loss)


def _check_parameter(study: Study, parameter: str) -> None:
    numbers = {
        key: each
        for key, each in study.space.parameters.items()
        if isinstance(each, (Float, Int)) and each.low > 0
    }
    if parameter not in numbers:
        rule = f"{study.path} did not search it, or not over numbers above 0"
        remedy = f"it searched {', '.join(numbers) or 'none'}"
        raise ConfigError([Problem("--parameter", rule, remedy, parameter)])


def _check(optima: Sequence[Optimum]) -> None:
    num_sizes = len({each.size for each in optima})
    if num_sizes < len(optima):
        rule, remedy = "two studies have the same size", "give one study per size"
        raise ConfigError([Problem("STUDY:SIZE", rule, remedy, has_value=False)])
    if num_sizes < FEWEST_SIZES:
        rule = "two sizes always lie on a line: nothing is left to check the fit"
        remedy = f"give studies of at least {FEWEST_SIZES} sizes"
        raise ConfigError([Problem("STUDY:SIZE", rule, remedy, num_sizes)])

"""Importance of each parameter, by Optuna's PED-ANOVA, which needs no further library."""

from __future__ import annotations

from drivetrain.core.requirements import require
from drivetrain.tune.journal import State
from drivetrain.tune.sampling import distribution, quiet
from drivetrain.tune.settings import Study

FEWEST = 10
"""Trials needed; with fewer, shares would be random."""


def of(study: Study, state: State, rung: int) -> dict[str, float]:
    """Shares that sum to 1, from the values at a rung; empty if too few trials have one."""
    optuna = require("optuna", extra="tune")
    parameters = study.space.parameters
    trials = [
        optuna.trial.create_trial(
            value=end.value,
            params=dict(state.asked[trial].values),
            distributions={
                key: distribution(optuna, parameters[key]) for key in state.asked[trial].values
            },
        )
        for (trial, at), end in sorted(state.ended.items())
        if at == rung and end.value is not None
    ]
    if len(trials) < FEWEST:
        return {}
    with quiet(optuna):
        direction = "minimize" if study.settings.mode == "min" else "maximize"
        made = optuna.create_study(direction=direction)
        made.add_trials(trials)
        # the better half: the default, a tenth, of a small study would be two or three trials
        evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=0.5)
        found = optuna.importance.get_param_importances(made, evaluator=evaluator)
    return {key: float(share) for key, share in found.items()}

"""What a trial has spent, in the unit of the study's budget, from its run's directory."""

from __future__ import annotations

from dataclasses import dataclass

from drivetrain.cluster.file import load_cluster
from drivetrain.core.errors import ConfigError, DrivetrainError, Problem
from drivetrain.record.reading import open_run
from drivetrain.record.status import RunStatus, status_of
from drivetrain.tune import budget
from drivetrain.tune.fit import Planner
from drivetrain.tune.journal import Asked
from drivetrain.tune.settings import Settings
from drivetrain.tune.trial_run import Runner

_PRICE = "record.price_per_device_hour="


@dataclass(frozen=True)
class Meter:
    """Measures what the trials of one study spend."""

    runner: Runner
    planner: Planner

    def spent(self, asked: Asked, rung: int) -> float:
        """What a trial's run has spent since it started, without what a fork's donor spent."""
        settings = self.runner.study.settings
        unit = budget.parse(settings.budget).unit
        try:
            status = status_of(open_run(self.runner.record(asked.trial)), 0.0)
        except DrivetrainError:  # it ended before it had a run directory
            return 0.0
        if unit == "flops":
            return self._flops(asked, rung, status)
        hours = status.device_s / 3600
        return hours if unit == "h" else hours * price_per_device_hour(settings)

    def _flops(self, asked: Asked, rung: int, status: RunStatus) -> float:
        prospect = self.planner.prospect(asked, self.runner.job(asked, rung))
        if prospect.flops_per_step is None:
            rule = f"the planner cannot predict a step's FLOPs ({prospect.unknown})"
            budgeted = self.runner.study.settings.budget
            raise ConfigError([Problem("--budget", rule, "use a budget in h or USD", budgeted)])
        begun_at = 0 if asked.fork is None else asked.fork.step
        return prospect.flops_per_step * max(0, status.step - begun_at)


def price_per_device_hour(settings: Settings) -> float:
    """The price that the script's arguments set for every trial, or that of the named cluster."""
    for word in settings.script_args:
        if word.startswith(_PRICE):
            return float(word.removeprefix(_PRICE))
    if settings.cluster:
        cluster = load_cluster(settings.cluster)
        if cluster.price_per_node_hour is not None:
            return cluster.price_per_node_hour / cluster.devices_per_node
    rule = "no price is known"
    remedy = f"give --cluster with an instance of the catalogue (p5.48xlarge:1), or {_PRICE}2.5"
    raise ConfigError([Problem("--budget", rule, remedy, settings.budget)])

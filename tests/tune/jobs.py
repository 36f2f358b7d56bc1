"""A job that trials are made like."""

from __future__ import annotations

from drivetrain.launch.job import Job
from drivetrain.tune.settings import Study


def like(study: Study) -> Job:
    settings = study.settings
    ranks = settings.processes_per_trial
    return Job("study", settings.script, (), (), "", "/", processes_per_node=ranks)

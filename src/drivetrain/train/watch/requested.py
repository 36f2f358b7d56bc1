"""Hooks that a command asks of the ranks through the environment: no script need be touched."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator

from drivetrain.record.requests import PROFILE_VARIABLE
from drivetrain.train.hooks import Hook

HOOKS_VARIABLE = "DRIVETRAIN_HOOKS"
"""`module:Class`, with commas between."""
PLAN_VARIABLE = "DRIVETRAIN_PLAN"
"""The file of the plan that a run is held against."""


def requested_hooks() -> Iterator[Hook]:
    """Imported when asked for: a run that nobody watches does not load torch's profiler."""
    for name in filter(None, os.environ.get(HOOKS_VARIABLE, "").split(",")):
        module, _, attribute = name.partition(":")
        yield getattr(importlib.import_module(module), attribute)()
    if PROFILE_VARIABLE in os.environ:
        from drivetrain.train.watch.profiling import Profiling

        yield Profiling()
    if PLAN_VARIABLE in os.environ:
        from drivetrain.train.watch.plan import PlanWatch

        yield PlanWatch()

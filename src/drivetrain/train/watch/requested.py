"""Hooks that a command requests through the environment, without changes to the script."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator

from drivetrain.record.requests import PROFILE_VARIABLE
from drivetrain.train.hooks import Hook

HOOKS_VARIABLE = "DRIVETRAIN_HOOKS"
"""Hooks as `module:Class`, separated by commas."""
PLAN_VARIABLE = "DRIVETRAIN_PLAN"
"""File of the plan that a run is compared with."""


def requested_hooks() -> Iterator[Hook]:
    """Yield the requested hooks. Their imports, such as torch's profiler, are made on demand."""
    for name in filter(None, os.environ.get(HOOKS_VARIABLE, "").split(",")):
        module, _, attribute = name.partition(":")
        yield getattr(importlib.import_module(module), attribute)()
    if PROFILE_VARIABLE in os.environ:
        from drivetrain.train.watch.profiling import Profiling

        yield Profiling()
    if PLAN_VARIABLE in os.environ:
        from drivetrain.train.watch.plan import PlanWatch

        yield PlanWatch()

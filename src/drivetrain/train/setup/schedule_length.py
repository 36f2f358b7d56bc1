"""Compare the length of the script's own schedule with that of the run."""

from __future__ import annotations

import math

from drivetrain.config.schema import RunConfig
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.data.batches import BatchPlan
from drivetrain.record.session import earlier_directory
from drivetrain.train.early_stopping import EarlyStopping
from drivetrain.train.optimization.own_schedule import OwnRate
from drivetrain.train.optimization.schedule import LearningRate
from drivetrain.train.optimization.schedule_length import ScheduleLength

_PER_EPOCH = 'LRSchedule(scheduler, every="epoch")'


def note_on_schedule_length(
    rate: LearningRate, config: RunConfig, plan: BatchPlan, total_steps: int | None, num_ranks: int
) -> list[str]:
    """Return a line if the schedule is made for a run of another length.

    ConfigError if torch would refuse a step of it before the run's end.
    """
    if not isinstance(rate, OwnRate) or total_steps is None:
        return []  # several models are stepped as often as their script likes
    length = ScheduleLength.of(rate.scheduler)
    epochs = _num_epochs(config, plan, total_steps)
    times = {"step": total_steps, "epoch": epochs}.get(rate.occasion)
    if length is None or times is None:
        return []
    is_exceeded = length.ends_hard and length.steps < times
    # one step more or less is how some count, and changes little
    if not is_exceeded and abs(length.steps - times) <= 1:
        return []
    if is_exceeded and _reaches_its_end(config):
        rule = f"can be stepped only {length.steps} times, but the run steps it {times} times"
        remedy = _remedy(length, rate, times, epochs)
        raise ConfigError([Problem("schedule", rule, remedy, length.name)])
    is_stepped = f"the run steps it {times} times, once per {rate.occasion}"
    line = f"schedule: {length.name} ends after {length.steps} steps ({length.setting}); "
    return [line + is_stepped + _hint(length, rate, times, epochs, num_ranks)]


def _reaches_its_end(config: RunConfig) -> bool:
    """Whether the run is sure to make all of its steps.

    A resumed one may have made some with other batch sizes.
    """
    stopping = EarlyStopping.of(config.early_stopping)
    may_end_early = config.max_time_s is not None or stopping is not None
    is_resumed = bool(earlier_directory() or config.checkpoint.resume_from)
    return not may_end_early and not is_resumed


def _num_epochs(config: RunConfig, plan: BatchPlan, total_steps: int) -> int | None:
    """Return how many epochs the run ends, counting one that is cut short."""
    if config.max_steps is None:
        return config.num_train_epochs
    return None if plan.steps_per_epoch is None else math.ceil(total_steps / plan.steps_per_epoch)


def _is_in_epochs(length: ScheduleLength, rate: OwnRate, epochs: int | None) -> bool:
    return rate.occasion == "step" and length.steps == epochs


def _remedy(length: ScheduleLength, rate: OwnRate, times: int, epochs: int | None) -> str:
    if _is_in_epochs(length, rate, epochs):
        return f"to step it once per epoch, pass {_PER_EPOCH}"
    return f"build it for {times} steps, or shorten the run"


def _hint(
    length: ScheduleLength, rate: OwnRate, times: int, epochs: int | None, num_ranks: int
) -> str:
    """Return what may be meant, or what follows."""
    if _is_in_epochs(length, rate, epochs):
        return f"; to step it once per epoch, pass {_PER_EPOCH}"
    if num_ranks > 1 and length.steps == times * num_ranks:
        return f", whatever the number of ranks: do not multiply by {num_ranks}"
    if length.rises_again and length.steps < times:
        return ", and its rate rises again after its end"
    return ""

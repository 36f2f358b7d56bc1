"""A schedule of the script's own that is made for a run of another length."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, OneCycleLR, SequentialLR, StepLR
from torch.utils.data import TensorDataset

from drivetrain import ConfigError, LRSchedule, prepare
from drivetrain.config.schema import RunConfig
from drivetrain.data.batches import BatchPlan
from drivetrain.train.optimization.own_schedule import OwnRate
from drivetrain.train.setup.schedule_length import note_on_schedule_length

HINT = '; to step it once per epoch, pass LRSchedule(scheduler, every="epoch")'


def lines(config: dict[str, Any], make: Any, **changes: Any) -> list[str]:
    """The start's lines about the schedule: 24 steps in 3 epochs."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    config = {"global_batch_size": 8, "num_train_epochs": 3, **config, **changes}
    data = TensorDataset(torch.ones(64, 4))
    loop = prepare(model, optimizer, data, config, scheduler=make(optimizer))
    return [note for note in loop.assembly.notes if note.startswith("schedule: ")]


def cosine(steps: int, every: Any = None) -> Any:
    return lambda optimizer: LRSchedule(CosineAnnealingLR(optimizer, steps), every)


def one_cycle(steps: int) -> Any:
    return lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)


def warm_cosine(steps: int) -> Any:
    return lambda o: SequentialLR(o, [LinearLR(o, 0.1), CosineAnnealingLR(o, steps)], [4])


def test_a_schedule_as_long_as_the_run_says_nothing(quiet: dict[str, Any]) -> None:
    for steps in (23, 24, 25):
        assert lines(quiet, cosine(steps)) == []
    assert lines(quiet, one_cycle(24)) == []
    assert lines(quiet, warm_cosine(20)) == []
    assert lines(quiet, cosine(3, "epoch")) == []
    assert lines(quiet, cosine(2, "epoch"), max_steps=12) == []
    assert lines(quiet, cosine(99, "never")) == []
    assert lines(quiet, lambda optimizer: StepLR(optimizer, 99)) == []


def test_one_of_another_length_is_announced(quiet: dict[str, Any]) -> None:
    said = "schedule: CosineAnnealingLR ends after {} steps ({}); the run steps it {} times, "
    shorter = said.format(12, "T_max", 24) + "once per step, and its rate rises again after its end"
    assert lines(quiet, cosine(12)) == [shorter]
    assert lines(quiet, cosine(48)) == [said.format(48, "T_max", 24) + "once per step"]
    assert lines(quiet, cosine(24, "epoch")) == [said.format(24, "T_max", 3) + "once per epoch"]
    in_epochs = said.format(3, "T_max", 24) + "once per step" + HINT
    assert lines(quiet, cosine(3)) == [in_epochs]
    whole = said.format(28, "T_max 24 from step 4", 24) + "once per step"
    assert lines(quiet, warm_cosine(24)) == [whole]
    assert len(lines(quiet, one_cycle(48))) == 1


def test_a_length_multiplied_by_the_number_of_processes_is_recognized(
    quiet: dict[str, Any],
) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rate = OwnRate(optimizer, LRSchedule(CosineAnnealingLR(optimizer, 48)))
    config = RunConfig(global_batch_size=8, max_steps=24, output_dir=quiet["output_dir"])
    notes = note_on_schedule_length(rate, config, BatchPlan(8, 8, 2, 64), 24, num_ranks=2)
    assert len(notes) == 1
    assert notes[0].endswith("whatever the number of ranks: do not multiply by 2")


def test_steps_that_torch_would_refuse_are_refused_at_the_start(quiet: dict[str, Any]) -> None:
    rule = r"schedule = OneCycleLR: can be stepped only 12 times, but the run steps it 24 times; "
    with pytest.raises(ConfigError, match=rule + "build it for 24 steps, or"):
        lines(quiet, one_cycle(12))
    with pytest.raises(ConfigError, match=r"only 3 times.*; to step it once per epoch, pass LRSch"):
        lines(quiet, one_cycle(3))
    # a run that may end before its last step keeps its chance
    assert len(lines(quiet, one_cycle(12), max_time_s=60)) == 1

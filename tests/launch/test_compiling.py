"""A compilation in the middle of a run is not a stall, and its step is marked."""

from __future__ import annotations

from pathlib import Path

import pytest

from drivetrain.record.reading import open_run
from drivetrain.record.step_file import COMPILES
from tests.launch.test_supervision import Run

# Rank 1 alone compiles again at its sixth step, for 5 s; rank 0 waits for it in a collective.
_SCRIPT = """\
import os
import time

import torch
from torch import nn
from drivetrain import Task, Trainer, prepare

RANK, calls = int(os.environ["RANK"]), 0
COMPILE_S = 5.0


def slow(graph, inputs):
    if calls > 5:
        time.sleep(COMPILE_S)
    return graph.forward


@torch.compile(backend=slow)
def squared(x, doubled):
    return (2 * x if doubled else x) ** 2


def loss(model, batch):
    global calls
    calls += 1
    return squared(model(batch), RANK == 1 and calls > 5).mean()


config = {
    "max_steps": 8,
    "global_batch_size": 4,
    "micro_batch_size": 2,
    "parallel": {"strategy": "ddp"},
    "checkpoint": {"every_steps": None},
}
data = [torch.ones(3) * i for i in range(16)]
if "DRIVETRAIN_TEST_KEEPS_LOOP" in os.environ:
    run = prepare(lambda: nn.Linear(3, 1), None, data, config)
    for step in run.steps():
        for batch in step:
            run.backward(loss(run.model, batch))
        run.step()
else:
    Trainer(Task(model=lambda: nn.Linear(3, 1), loss=loss), config).fit(data)
"""


@pytest.mark.parametrize(
    "keeps_loop", [False, pytest.param(True, marks=[pytest.mark.slow, pytest.mark.long])]
)
def test_a_compilation_in_the_middle_of_a_run_is_no_stall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keeps_loop: bool
) -> None:
    if keeps_loop:
        monkeypatch.setenv("DRIVETRAIN_TEST_KEEPS_LOOP", "1")
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    run = Run(tmp_path, "--stall-timeout=1.5", "--slow-timeout=60", str(script))
    code, stderr = run.end()
    assert "no progress" not in stderr
    assert code == 0
    marked = {}
    for rank in (0, 1):
        table = open_run(run.directory).steps(rank)
        marked[rank] = table["step"][(table["flags"] & COMPILES) > 0].tolist()
    assert marked == {0: [1], 1: [1, 6]}


@pytest.mark.slow
@pytest.mark.long
def test_a_compilation_that_never_ends_is_a_stall(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT.replace("COMPILE_S = 5.0", "COMPILE_S = 60.0"))
    run = Run(tmp_path, "--stall-timeout=1.5", "--slow-timeout=4", "--max-restarts=0", str(script))
    code, stderr = run.end()
    assert code != 0
    assert "rank 1: no progress for 4" in stderr
    assert "(compiling; 4.0 s are allowed)" in stderr

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from drivetrain.core.errors import WorkerFailure
from drivetrain.testing import run_ranks


def add_up(scale: float) -> float:
    tensor = torch.ones(1) * scale * (dist.get_rank() + 1)
    dist.all_reduce(tensor)
    return float(tensor)


def fail_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the reason")
    dist.all_reduce(torch.ones(1))


def die_on_rank_0() -> None:
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def sleep_on_rank_1() -> None:
    if dist.get_rank() == 1:
        time.sleep(600)


def test_results_come_in_rank_order() -> None:
    assert run_ranks(add_up, 2, args=(3.0,)) == [9.0, 9.0]


def test_the_failing_ranks_own_traceback_is_raised() -> None:
    with pytest.raises(WorkerFailure, match=r"(?s)rank 1 of 2 failed.*ValueError: the reason"):
        run_ranks(fail_on_rank_1, 2)


def test_a_killed_rank_is_the_cause_not_the_one_that_noticed() -> None:
    with pytest.raises(WorkerFailure, match="(?s)rank 0 of 2 failed.*signal 9"):
        run_ranks(die_on_rank_0, 2)


def test_a_rank_that_hangs_is_named_and_ended() -> None:
    with pytest.raises(WorkerFailure, match=r"ranks \[.*1\] still running after 8 s"):
        run_ranks(sleep_on_rank_1, 2, timeout_s=8)

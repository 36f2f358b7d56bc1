"""notebook_launcher: runs a notebook's function on several ranks, as Accelerate's does.

    from drivetrain import notebook_launcher
    notebook_launcher(train, args=(0.1,), num_processes=2)

Ranks are forked from the notebook, so they have everything that its cells have defined. For a
function in a file, use `drivetrain train`, which supervises, restarts and resumes.
"""

from __future__ import annotations

import os
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from drivetrain.cluster.environments import detect
from drivetrain.compat.relaunch import first_failure, meeting, place_of
from drivetrain.core.errors import ConfigError, EnvironmentProblem, Problem, WorkerFailure
from drivetrain.parallel.accelerator import num_devices
from drivetrain.supervise.processes.forking import Forked, fork_call, has_touched_accelerator
from drivetrain.supervise.processes.worker import PARENT, die_with_parent, leave_for_supervisor

_LOOK_S = 0.1
_PATIENCE_S = 5.0
"""Seconds for the other ranks to end by themselves after one has failed."""


def notebook_launcher(
    function: Callable[..., object], args: Sequence[Any] = (), num_processes: int | None = None
) -> None:
    """Call `function(*args)` on `num_processes` ranks of this machine, and wait for them.

    Each rank is a separate process, in which Trainer, prepare() and the drop-in trainers find their
    rank. The function's return value is discarded: save what you need. If a rank fails, its own
    traceback is raised here, and the other ranks are ended.

    Args:
        function: Any function, including one that a cell defines.
        args: Its arguments, the same on every rank.
        num_processes: Number of ranks. Default: one per device, or one without devices. A single
            rank is this process itself.
    """
    if isinstance(args, int):
        rule, remedy = "are the function's arguments", f"write num_processes={args}"
        raise ConfigError([Problem("args", rule, remedy, args)])
    wanted = num_processes or max(1, num_devices())
    if wanted == 1:
        function(*args)
        return
    _refuse_where_no_fork_helps()
    with tempfile.TemporaryDirectory(prefix="drivetrain-ranks-") as folder:
        errors = Path(folder)
        store, shared = meeting(wanted)
        ranks: list[Forked] = []
        try:
            for rank in range(wanted):
                told = {**os.environ, **shared, **place_of(rank, errors), PARENT: str(os.getpid())}
                with warnings.catch_warnings():  # Python warns of any fork when threads run
                    warnings.simplefilter("ignore", DeprecationWarning)
                    ranks.append(fork_call(lambda: _as_rank(function, args), told))
            _await(ranks, errors)
        finally:
            for each in ranks:
                each.kill()
                each.wait()
            del store  # kept alive until the last rank has ended


def _refuse_where_no_fork_helps() -> None:
    world = detect().world_size
    rule = remedy = ""
    if world > 1:
        rule = f"this process is already one of {world} ranks"
        remedy = "call the function itself"
    elif not hasattr(os, "fork"):
        rule, remedy = "needs fork, which this system does not support", "use `drivetrain train`"
    elif dist.is_initialized():
        rule = "a process group is open in this process"
        remedy = "restart the kernel, and open it only inside the function"
    elif has_touched_accelerator():
        rule = "this process has used a device, so forked ranks cannot use it"
        remedy = "restart the kernel, and use devices only inside the function"
    if rule:
        raise EnvironmentProblem([Problem("notebook_launcher", rule, remedy, has_value=False)])


def _as_rank(function: Callable[..., object], args: Sequence[Any]) -> None:
    die_with_parent()
    # OpenMP's threads do not survive a fork, and using more than one would wait for them forever
    torch.set_num_threads(1)
    try:
        function(*args)
    except BaseException as error:
        leave_for_supervisor(error)
        raise SystemExit(1) from None
    if dist.is_initialized():
        dist.destroy_process_group()


def _await(ranks: list[Forked], errors: Path) -> None:
    """Wait until all ranks have succeeded; WorkerFailure with the first failed rank's error."""
    codes = [each.poll() for each in ranks]
    while None in codes and not any(codes):
        time.sleep(_LOOK_S)
        codes = [each.poll() for each in ranks]
    failed = [rank for rank, code in enumerate(codes) if code]
    if not failed:
        return
    deadline_s = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline_s and any(each.poll() is None for each in ranks):
        time.sleep(_LOOK_S)
    unsaid = (failed[0], f"it exited with code {codes[failed[0]]} without a message")
    rank, said = first_failure(errors, _LOOK_S) or unsaid
    raise WorkerFailure(f"rank {rank} of {len(ranks)} failed:\n{said}")

"""notebook_launcher: a notebook's own function on several ranks, as Accelerate has it.

    from drivetrain import notebook_launcher
    notebook_launcher(train, args=(0.1,), num_processes=2)

Ranks are forked from the notebook, which is how they have what its cells have defined. A function
in a file needs none of this: `drivetrain train` supervises, restarts and resumes.
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
"""For ranks to end by themselves once one of them has failed."""


def notebook_launcher(
    function: Callable[..., object], args: Sequence[Any] = (), num_processes: int | None = None
) -> None:
    """Call `function(*args)` on `num_processes` ranks of this machine, and wait for them.

    Each rank is a process of its own, in which Trainer, prepare() and the drop-in trainers find
    their ranks. What the function returns is not brought back: save it. When a rank fails, its own
    traceback is raised here, and the others are ended.

    Args:
        function: Any, one that a cell has defined included.
        args: Its arguments, the same on every rank.
        num_processes: Ranks; left out: one per device, or one. One is this process itself.
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
                with warnings.catch_warnings():  # Python's, of any fork beside threads
                    warnings.simplefilter("ignore", DeprecationWarning)
                    ranks.append(fork_call(lambda: _as_rank(function, args), told))
            _await(ranks, errors)
        finally:
            for each in ranks:
                each.kill()
                each.wait()
            del store  # held until the last of them has ended


def _refuse_where_no_fork_helps() -> None:
    world = detect().world_size
    rule = remedy = ""
    if world > 1:
        rule = f"this process is one of {world} ranks already"
        remedy = "call the function itself"
    elif not hasattr(os, "fork"):
        rule, remedy = "needs fork, which this system does not have", "use `drivetrain train`"
    elif dist.is_initialized():
        rule = "a process group is open in this process"
        remedy = "restart the kernel, and open it in the function only"
    elif has_touched_accelerator():
        rule = "a device was used in this process, and forked ranks could not use it"
        remedy = "restart the kernel, and use devices in the function only"
    if rule:
        raise EnvironmentProblem([Problem("notebook_launcher", rule, remedy, has_value=False)])


def _as_rank(function: Callable[..., object], args: Sequence[Any]) -> None:
    die_with_parent()
    # OpenMP's threads stay behind in a fork, and more than one would wait for them for ever
    torch.set_num_threads(1)
    try:
        function(*args)
    except BaseException as error:
        leave_for_supervisor(error)
        raise SystemExit(1) from None
    if dist.is_initialized():
        dist.destroy_process_group()


def _await(ranks: list[Forked], errors: Path) -> None:
    """Until all have ended well, or WorkerFailure with what the first that did not has left."""
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
    unsaid = (failed[0], f"it ended with exit code {codes[failed[0]]}, and said nothing")
    rank, said = first_failure(errors, _LOOK_S) or unsaid
    raise WorkerFailure(f"rank {rank} of {len(ranks)} failed:\n{said}")

"""run_ranks: run a function on n real processes with a process group, from an ordinary test.

def body(scale):
    tensor = torch.ones(1) * scale
    dist.all_reduce(tensor)
    return tensor.item()

assert run_ranks(body, 2, args=(3.0,)) == [6.0, 6.0]
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from drivetrain.core.errors import EnvironmentProblem, Problem, WorkerFailure
from drivetrain.core.processes import end_child

Result = TypeVar("Result")
_IMPORTED_ONCE = ("drivetrain.testing.ahead",)


def run_ranks(
    function: Callable[..., Result],
    world_size: int,
    timeout_s: float = 300.0,
    args: Sequence[Any] = (),
    backend: str = "gloo",
) -> list[Result]:
    """Run `function(*args)` on every rank and return the results in rank order.

    Ranks are separate processes, so the function must be importable. They are forked from a server
    process that has imported torch and shares only the environment and the working directory with
    this process. The ranks rendezvous at a port that this process holds (never a guessed one).
    No process is left behind.

    Args:
        function: Called on every rank.
        world_size: Number of ranks.
        timeout_s: Time limit for all ranks together.
        args: Arguments of the function.
        backend: torch's backend; "cpu:gloo,cuda:nccl" on a machine with GPUs.

    Raises:
        WorkerFailure: A rank failed (with its traceback; the others are ended), or ranks were
            still running after `timeout_s` (they are named).
    """
    _refuse_notebook(function)
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_IMPORTED_ONCE))
    _start_importing()
    deadline_s = time.monotonic() + timeout_s
    ranks: list[_Rank] = []
    try:
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_worker,
                args=(
                    _Environment(),
                    sender,
                    function,
                    tuple(args),
                    rank,
                    world_size,
                    store.port,
                    timeout_s,
                    backend,
                ),
                name=f"rank-{rank}",
                daemon=False,
            )
            process.start()
            sender.close()
            ranks.append(_Rank(rank, process, receiver))
        return _results(ranks, deadline_s, timeout_s)
    finally:
        for each in ranks:
            each.end()


def _start_importing() -> None:
    """Start the fork server with SIGINT blocked.

    Ctrl-C is for this process, which ends the ranks; during the imports it would print a traceback.
    The signal is blocked, not ignored, so that one that arrives meanwhile is not lost.
    """
    resource_tracker.ensure_running()  # it unblocks signals when it starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _refuse_notebook(function: Callable[..., Any]) -> None:
    """EnvironmentProblem for a function defined in a notebook, which ranks cannot import."""
    module = getattr(function, "__module__", "")
    if module == "__main__" and not hasattr(sys.modules[module], "__file__"):
        rule = "was defined in a notebook, which ranks cannot import"
        remedy = "put it in a .py file next to the notebook and import it from there"
        raise EnvironmentProblem([Problem("run_ranks", rule, remedy, function.__name__)])


class _Environment:
    """This process's environment; unpickling sets it, before the arguments after it are read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _take_on, (dict(os.environ),)


def _take_on(variables: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)


@dataclass(frozen=True)
class _Outcome:
    rank: int
    at_s: float
    error: str = ""
    result: Any = None


@dataclass
class _Rank:
    rank: int
    process: BaseProcess
    receiver: Connection

    def outcome(self) -> _Outcome:
        """Return what the rank sent; a process that died silently is taken as the first cause."""
        try:
            outcome: _Outcome = self.receiver.recv()
        except EOFError:
            self.process.join(5)
            return _Outcome(self.rank, 0.0, error=_death(self.process.exitcode))
        return outcome

    def end(self) -> None:
        end_child(self.process)
        self.receiver.close()


def _results(ranks: Sequence[_Rank], deadline_s: float, timeout_s: float) -> list[Any]:
    waiting: dict[Any, _Rank] = {each.receiver: each for each in ranks}
    outcomes: list[_Outcome] = []
    while waiting:
        ready = wait(list(waiting), max(0.0, deadline_s - time.monotonic()))
        if not ready:
            late = sorted(each.rank for each in waiting.values())
            raise WorkerFailure(f"ranks {late} still running after {timeout_s:g} s")
        outcomes += [waiting.pop(receiver).outcome() for receiver in ready]
        if any(outcome.error for outcome in outcomes):
            # A failing rank makes others fail: wait for those too, the earliest error is the cause.
            time.sleep(0.2)
            outcomes += [waiting.pop(receiver).outcome() for receiver in wait(list(waiting), 0)]
            first = min((o for o in outcomes if o.error), key=lambda o: o.at_s)
            raise WorkerFailure(f"rank {first.rank} of {len(ranks)} failed\n\n{first.error}")
    return [outcome.result for outcome in sorted(outcomes, key=lambda o: o.rank)]


def _death(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"ended by signal {-exit_code} without a traceback"
    return f"exited with code {exit_code} without a result"


def _worker(
    _: None,
    sender: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    world_size: int,
    port: int,
    timeout_s: float,
    backend: str,
) -> None:
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        return  # interrupted while this rank was being forked: nothing would end it
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the fork server ignores it,
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # and was started with it blocked

    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore

    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    faulthandler.enable()  # a crash by a signal prints its stack
    try:
        timeout = timedelta(seconds=timeout_s)
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=timeout
        )
        result = function(*args)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        sender.send(_Outcome(rank, time.time(), error=traceback.format_exc()))
        sender.close()
        # Skip the interpreter's shutdown, which would wait for collectives that never complete.
        os._exit(1)
    sender.send(_Outcome(rank, time.time(), result=result))
    sender.close()

"""A measurement with one rank on each of several hosts."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, Protocol

from drivetrain.core.errors import WorkerFailure

_PORT = 29400


class Host(Protocol):
    """As far as `drivetrain.testing.hosts` is needed here; that room stands above this one."""

    @property
    def address(self) -> str:
        """Where the others reach it."""
        ...

    def popen(self, command: Sequence[str | Path], *, env: dict[str, str]) -> Any:
        """Start a command on it."""
        ...


MakeHosts = Callable[[int, float | None], AbstractContextManager[Sequence[Host]]]


def run_ranks_on(hosts: Sequence[Host], words: Sequence[str], give_up_s: float) -> None:
    """`python -m words` on each, as ranks of one world; WorkerFailure if one fails."""
    with ExitStack() as stack:
        processes = []
        for rank, host in enumerate(hosts):
            env = _environment(rank, len(hosts), hosts[0].address)
            process = host.popen([sys.executable, "-m", *words], env=env)
            stack.callback(process.kill)
            processes.append(process)
        for process in processes:
            if process.wait(give_up_s) != 0:
                raise WorkerFailure("the measurement failed; its error stands above")


def _environment(rank: int, world_size: int, main_address: str) -> dict[str, str]:
    return {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "NODE_RANK": str(rank),
        "MASTER_ADDR": main_address,
        "MASTER_PORT": str(_PORT),
        "OMP_NUM_THREADS": "1",
    }

"""A measurement by ranks on several hosts."""

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


def run_ranks_on(
    hosts: Sequence[Host], words: Sequence[str], give_up_s: float, ranks_per_host: int = 1
) -> None:
    """`python -m words` on each, as ranks of one world; WorkerFailure if one fails."""
    with ExitStack() as stack:
        processes = []
        for rank in range(len(hosts) * ranks_per_host):
            host = hosts[rank // ranks_per_host]
            env = _environment(rank, len(hosts), ranks_per_host, hosts[0].address)
            process = host.popen([sys.executable, "-m", *words], env=env)
            stack.callback(process.kill)
            processes.append(process)
        for process in processes:
            if process.wait(give_up_s) != 0:
                raise WorkerFailure("the measurement failed; its error stands above")


def _environment(
    rank: int, num_hosts: int, ranks_per_host: int, main_address: str
) -> dict[str, str]:
    node, local = divmod(rank, ranks_per_host)
    return {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(num_hosts * ranks_per_host),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(ranks_per_host),
        "NODE_RANK": str(node),
        "MASTER_ADDR": main_address,
        "MASTER_PORT": str(_PORT),
        "OMP_NUM_THREADS": "1",
    }

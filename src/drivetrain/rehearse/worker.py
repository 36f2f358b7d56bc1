"""A rehearsed rank: a process that runs the user's script as that rank."""

from __future__ import annotations

import os
import runpy
import sys
import time
import traceback
import warnings
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import FileStore

from drivetrain.core.errors import ConfigError, Problem
from drivetrain.core.intercept import OwnLoopMet, intercepting
from drivetrain.core.processes import end_with_parent
from drivetrain.parallel.world import layout_from
from drivetrain.rehearse.calls import distinct, of_error
from drivetrain.rehearse.fake_tensor_dispatch import FakeTensorDispatch, LiveBytes
from drivetrain.rehearse.findings import Failure, RankReport
from drivetrain.rehearse.fit import Seen, rehearse_fit
from drivetrain.rehearse.mailbox import Mailbox, NotTogether
from drivetrain.rehearse.world import Chosen, become_rank, join
from drivetrain.train.trainer import Trainer

SHOW = "DRIVETRAIN_REHEARSE_SHOW"
"""Set to any value to show the ranks' output and full tracebacks."""


@dataclass(frozen=True)
class Part:
    """What a rank's process receives when it starts."""

    argv: tuple[str, ...]
    rank: int
    world_size: int
    devices_per_node: int
    device_memory_bytes: int | None
    letters: str
    """The file through which ranks exchange messages."""
    timeout_s: float
    chosen: tuple[Chosen, ...] = ()
    """All rehearsed ranks; empty for the first, which determines the layout."""


class _Through(BaseException):
    """Raised after the training has been rehearsed; the rest of the script is not run."""


class _RehearsedRank:
    def __init__(self, part: Part, connection: Connection) -> None:
        self.part = part
        self.connection = connection
        self.tensors = FakeTensorDispatch(LiveBytes())
        self.seen = Seen()
        self.chosen = part.chosen
        self.has_trained = False

    def fit(self, trainer: Trainer, train: Any, val: Any = None) -> None:  # noqa: ARG002
        """Replacement for Trainer.fit."""
        self.has_trained = True
        parallel = trainer.config.parallel
        layout = layout_from(parallel, self.part.world_size)
        if not self.chosen:
            self.connection.send(layout)
            self.chosen = self.connection.recv()
        store = FileStore(self.part.letters)
        ranks = [each.rank for each in self.chosen]
        patience_s = self.part.timeout_s / 5  # shorter than the client's own timeout
        self.tensors.mailbox = Mailbox(store, self.part.rank, ranks, layout, patience_s)
        world = join(parallel, self.part.device_memory_bytes)
        rehearse_fit(trainer, train, world, self.tensors, self.seen)
        raise _Through

    def report(self, failure: Failure | None, seconds: float) -> RankReport:
        """Return what was observed, whether or not the rank failed."""
        kinds = {each.rank: each.kind for each in self.chosen}
        calls = tuple(self.tensors.calls)
        return RankReport(
            rank=self.part.rank,
            kind=kinds.get(self.part.rank, "first rank"),
            calls=calls,
            in_step=calls[self.seen.last_step],
            memory=self.seen.memory(self.tensors),
            missing=self.seen.missing,
            values_read=tuple(distinct(self.tensors.values_read)),
            failure=failure,
            seconds=seconds,
            process_bytes=_own_bytes(),
            notes=self.seen.notes,
            batches=self.seen.batches,
        )


def rehearse_rank(part: Part, connection: Connection) -> None:
    """A process's main function: run the script and send the report."""
    end_with_parent()
    began = time.perf_counter()
    _be_silent()
    torch.set_num_threads(1)
    rank = _RehearsedRank(part, connection)
    failure: Failure | None = None
    try:
        become_rank(part.rank, part.world_size, part.devices_per_node)
        setattr(Trainer, "fit", lambda trainer, train, val=None: rank.fit(trainer, train, val))  # noqa: B010
        with intercepting():  # for prepare; fit is replaced already
            _run(part.argv)
        if not rank.has_trained:
            failure = Failure(
                "RuntimeError",
                "the script ended without Trainer(…).fit(…); nothing to rehearse",
                None,
            )
    except _Through:
        pass
    except OwnLoopMet:
        failure = _own_loop(part.argv)
    except BaseException as error:
        failure = _failure(error)
    connection.send(rank.report(failure, time.perf_counter() - began))
    connection.close()
    os._exit(0)  # skips the destruction of thousands of process groups


def _run(argv: tuple[str, ...]) -> None:
    if argv[0] == "-m":
        sys.argv = list(argv[1:])
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = list(argv)
    sys.path.insert(0, str(Path(argv[0]).resolve().parent))
    runpy.run_path(argv[0], run_name="__main__")


def _own_loop(argv: tuple[str, ...]) -> Failure:
    rule = "trains in its own loop (prepare), which cannot be rehearsed"
    script = argv[1] if argv[0] == "-m" else argv[0]
    problem = Problem("SCRIPT", rule, "use Trainer.fit for the rehearsal", script)
    return Failure("ConfigError", str(problem), None, is_config=True, refused=problem)


def _failure(error: BaseException) -> Failure:
    if os.environ.get(SHOW):
        traceback.print_exception(error)
    message = str(error).strip() or traceback.format_exc(limit=-1).strip()
    if isinstance(error, SystemExit):
        message = f"the script called exit({error.code}) before it trained"
    return Failure(
        type(error).__name__,
        message.split("\n\nC++ CapturedTraceback")[0],
        of_error(error.__traceback__),
        is_config=isinstance(error, ConfigError),
        is_together=not isinstance(error, NotTogether),
    )


def _be_silent() -> None:
    """Silence the script's output, which many ranks would print to one terminal."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    if not os.environ.get(SHOW):
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
    warnings.simplefilter("ignore")


def _own_bytes() -> int:
    """Return this process's memory, counting shared pages proportionally."""
    try:
        for row in Path("/proc/self/smaps_rollup").read_text().splitlines():
            if row.startswith("Pss:"):
                return int(row.split()[1]) * 1024
    except OSError:
        pass
    return 0

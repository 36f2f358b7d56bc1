"""Ranks without a launcher: this process becomes rank 0 and reruns the script for the others.

Used if a script asks for several devices but was started as plain `python script.py`. The other
ranks run the same script from its top, as they would under torchrun, so nothing has to be picklable
and no `if __name__ == "__main__"` is needed. They rendezvous at a port that rank 0 keeps open.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from drivetrain.core.errors import DrivetrainError, EnvironmentProblem, Problem, WorkerFailure
from drivetrain.supervise.processes import worker as supervised_worker

_MLFLOW_RUN = "MLFLOW_RUN_ID"
_started: list[subprocess.Popen[bytes]] = []
_stores: list[TCPStore] = []


@contextmanager
def local_ranks(num_ranks: int) -> Iterator[None]:
    """Run the block as rank 0 of `num_ranks`; a failing rank's own traceback is raised here."""
    folder = tempfile.TemporaryDirectory(prefix="drivetrain-ranks-")
    atexit.register(folder.cleanup)
    before = dict(os.environ)
    errors = Path(folder.name)
    _start(num_ranks, errors)
    done = threading.Event()
    threading.Thread(target=_watch, args=(errors, done), daemon=True).start()
    try:
        yield
    except BaseException as error:
        failed = None if isinstance(error, DrivetrainError) else first_error(errors, 2.0)
        _end(patience_s=0.5)
        os.environ.clear()
        os.environ.update(before)
        if failed:
            raise WorkerFailure(failed) from error
        raise
    finally:
        done.set()


def _watch(errors: Path, done: threading.Event, patience_s: float = 5.0) -> None:
    """End the run if a rank dies; rank 0 cannot notice while it waits for that rank to join."""
    while not done.wait(0.5):
        if any(process.poll() not in (None, 0) for process in _started):
            if done.wait(patience_s):
                return
            reason = first_error(errors, 0.5) or "another rank ended without a message\n"
            sys.stderr.write(f"\n{reason}")
            sys.stderr.flush()
            for process in _started:
                process.terminate()
            os._exit(WorkerFailure.exit_code)


def meeting(num_ranks: int) -> tuple[TCPStore, dict[str, str]]:
    """Open a store on a free port; return it and the environment variables all ranks share."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    threads = max(1, (os.cpu_count() or 1) // num_ranks)
    return store, {
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        # torch's env:// then joins the store above instead of opening its own
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        **_open_runs(),
    }


def place_of(rank: int, errors: Path) -> dict[str, str]:
    """Return one rank's environment variables: its rank, and the file for its error."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "TORCHELASTIC_ERROR_FILE": str(errors / f"{rank}.json"),
    }


def _start(num_ranks: int, errors: Path) -> None:
    command = _this_script()
    store, shared = meeting(num_ranks)
    _stores.append(store)  # rank 0 holds the port for as long as the process lives
    for rank in range(1, num_ranks):
        # Only rank 0 prints: the script's output on the other ranks is dropped.
        _started.append(
            subprocess.Popen(  # noqa: S603
                command,
                env={**os.environ, **shared, **place_of(rank, errors)},
                stdout=subprocess.DEVNULL,
                cwd=_first_folder(),
            )
        )
    shared.pop(_MLFLOW_RUN, None)  # this process already has it open
    os.environ |= {**shared, "RANK": "0", "LOCAL_RANK": "0"}
    torch.set_num_threads(int(shared["OMP_NUM_THREADS"]))
    atexit.register(_end, patience_s=60.0)


def _open_runs() -> dict[str, str]:
    """Pass on the open MLflow run: a rank that starts a run joins this one instead."""
    mlflow: Any = sys.modules.get("mlflow")
    run = None if mlflow is None else mlflow.active_run()
    return {} if run is None else {_MLFLOW_RUN: str(run.info.run_id)}


def _first_folder() -> str:
    """Return the directory this process was started in; the script may have changed directory."""
    started_in = os.environ.get("PWD", "")
    return started_in if Path(started_in).is_dir() and started_in else str(Path.cwd())


def _this_script() -> list[str]:
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    worker = [sys.executable, "-m", supervised_worker.__name__]
    if "pytest" in sys.modules or (spec is None and not hasattr(main, "__file__")):
        raise EnvironmentProblem(
            [
                Problem(
                    "num_gpus",
                    "more than one rank can only be started from a script",
                    "in a notebook, drivetrain.notebook_launcher(function, num_processes=N); else "
                    "save it as a file and run it with python, or with "
                    "`drivetrain train --nproc-per-node N`",
                    has_value=False,
                )
            ]
        )
    if spec is not None:
        return [*worker, "-m", spec.name.removesuffix(".__main__"), *sys.argv[1:]]
    return [*worker, str(Path(str(main.__file__)).resolve()), *sys.argv[1:]]


def first_error(errors: Path, patience_s: float) -> str | None:
    """Return the error of the first rank that failed."""
    found = first_failure(errors, patience_s)
    return None if found is None else found[1]


def first_failure(errors: Path, patience_s: float) -> tuple[int, str] | None:
    """Return the first rank that failed and its error; wait a moment for ranks to write it."""
    deadline_s = time.monotonic() + patience_s
    while time.monotonic() < deadline_s:
        found = {int(file.stem): json.loads(file.read_text()) for file in errors.glob("*.json")}
        if found:
            rank = min(found, key=lambda each: found[each]["message"]["extraInfo"]["at_s"])
            return rank, str(found[rank]["message"]["message"])
        time.sleep(0.1)
    return None


def _end(patience_s: float) -> None:
    """Wait for the other ranks to reach the end of the script; end those that do not."""
    for process in _started:
        try:
            code = process.wait(patience_s)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()
        else:
            if code and patience_s > 1:
                sys.stderr.write(f"a rank exited with code {code} after training had finished\n")
    _started.clear()

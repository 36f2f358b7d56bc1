"""The Ray Train worker function: runs the user's script as if `drivetrain train` had started it.

Ray has set torch's variables and formed the process group; this adds the run directory, from which
a script that trains with Drivetrain resumes. Ray runs it in a thread, which receives no signals, so
a file in the run directory is the request to stop.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from drivetrain.launch import ownership
from drivetrain.launch.targets.ray.failures import ScriptFailed
from drivetrain.record.requests import ask_to_stop
from drivetrain.record.session import ACCEPT_CHANGE, RUN_DIR, SESSION, TRAINS, read_progress
from drivetrain.supervise.policy import PREEMPTED_CODE
from drivetrain.supervise.processes.worker import run_argv

STOP_FILE = "stop"
STOPPED = "stopped"
_LOOK_EVERY_S = 1.0


def run_script(config: dict[str, Any]) -> str | None:
    """Run the script; return STOPPED if it was asked to stop and has saved."""
    session = Path(tempfile.mkdtemp(prefix="drivetrain-"))
    errors = session / "error.json"
    os.environ |= ownership.read_secrets(Path(config["run_dir"]))
    os.environ |= {
        RUN_DIR: config["run_dir"],
        SESSION: str(session),
        "TORCHELASTIC_ERROR_FILE": str(errors),
    }
    if accepted := config.get("accepted_changes"):
        os.environ[ACCEPT_CHANGE] = ",".join(accepted)
    os.chdir(config["working_dir"])
    sys.path.insert(0, "")  # replaced by the script's directory
    stop_file = Path(config["run_dir"]) / STOP_FILE
    try:
        with _watching(stop_file):
            code = run_argv(config["argv"])
        if code == 0:
            return None
        if code == PREEMPTED_CODE and stop_file.exists():
            return STOPPED
        raise _failure(code, session, errors)
    finally:
        shutil.rmtree(session, ignore_errors=True)


@contextmanager
def _watching(stop_file: Path) -> Iterator[None]:
    """Ask this rank to stop when the file appears; the ranks agree on the step by themselves."""
    is_over = threading.Event()

    def look() -> None:
        while not is_over.wait(_LOOK_EVERY_S):
            if stop_file.exists():  # repeatedly: the run may not be listening yet
                ask_to_stop("drivetrain stop")

    threading.Thread(target=look, name="drivetrain-stop", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


def _failure(code: int, session: Path, errors: Path) -> ScriptFailed:
    try:
        text = json.loads(errors.read_text())["message"]["message"]
    except (OSError, ValueError, KeyError):
        text = f"the script ended with exit code {code}"
    progress = read_progress(session, int(os.environ.get("LOCAL_RANK", "0")))
    step = 0 if progress is None else progress.step
    return ScriptFailed(text, code, step, (session / TRAINS).exists(), os.getpid())

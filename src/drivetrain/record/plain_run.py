"""A plain run: `python script.py`, without the launcher. How it is stopped, and how it resumes."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import threading
from multiprocessing import parent_process
from pathlib import Path
from types import TracebackType

from drivetrain.cluster.environments import detect
from drivetrain.config.command_line import runs_own_command_line
from drivetrain.core.errors import Preempted, StoppedByCtrlC
from drivetrain.core.processes import is_interactive
from drivetrain.record.session import RUN_DIR, SESSION, is_first_run

AGAIN = "run the same command again"


class StoppedScript(Preempted, SystemExit):
    """Preempted, in a script that nothing but Python runs.

    Uncaught, it ends the process as `SystemExit` does: with its exit code, without a traceback.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.code = self.exit_code


def stopped_script(message: str, signal_name: str) -> StoppedScript | StoppedByCtrlC:
    """Return what a plain script's run raises once it has saved."""
    if signal_name != signal.SIGINT.name:
        return StoppedScript(message)
    if sys.version_info >= (3, 13):  # where it counts as an interrupt: exit code 130
        sys.excepthook = _without_traceback_of_ctrl_c
    return StoppedByCtrlC(message)


def _without_traceback_of_ctrl_c(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    if not issubclass(kind, StoppedByCtrlC):
        sys.__excepthook__(kind, error, traceback)


def is_plain() -> bool:
    """True in a script that ends with its run; False under a launcher and in a larger program.

    In a notebook, a test runner, a child process or a thread, Ctrl-C and the process's exit code
    belong to the program around it.
    """
    return (
        SESSION not in os.environ
        and runs_own_command_line()
        and not is_interactive()
        and parent_process() is None
        and threading.current_thread() is threading.main_thread()
    )


def how_to_resume(run_dir: Path) -> str:
    """Return what to do to resume this process's run, which was interrupted."""
    if RUN_DIR in os.environ:
        return f"{AGAIN} to resume"
    if not is_first_run():
        # from outside, only a script's first run can be named
        key = f"checkpoint.resume_from={shown(run_dir)}"
        return f"to continue it in a new run, set {key} in its config"
    if SESSION in os.environ:
        return resume_with_launcher(run_dir)
    variable = f"{RUN_DIR}={shlex.quote(shown(run_dir))}"
    if is_plain() and detect().world_size == 1:
        return f"to resume: {variable} {shlex.join(sys.orig_argv)}"
    return f"to resume, set {variable} and {AGAIN}"


def resume_with_launcher(run_dir: Path | None) -> str:
    """Return what to do to resume a run that `drivetrain train` started."""
    if run_dir is None or RUN_DIR in os.environ:
        return f"{AGAIN} to resume"
    flag = f"--run-dir {shlex.quote(shown(run_dir))}"
    return f"to resume, {AGAIN} with {flag} before the script"


def shown(path: Path) -> str:
    """Return a path as the shell that started this process understands it."""
    here = Path.cwd()
    has_moved = os.environ.get("PWD", str(here)) != str(here)  # the script has called chdir
    return str(path if has_moved or not path.is_relative_to(here) else path.relative_to(here))

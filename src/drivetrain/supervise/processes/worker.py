"""The main program of a rank's process: runs the user's script as if it had been started directly.

A process may be started before there is work for it (a warm spare): it imports what the script will
need, waits for its rank, and is then a worker like any other. An uncaught exception is written to a
file for the supervisor, which shows the first rank's and summarizes the others', instead of being
printed by every rank at once. This module loads only the standard library, because it runs before
the user's first line.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import ctypes
import importlib
import importlib.util
import json
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

from drivetrain.core.files import write_whole
from drivetrain.core.imports import without_collector
from drivetrain.core.processes import settle_exit_code
from drivetrain.supervise.failures import dump_responder

CONTROL = "DRIVETRAIN_CONTROL_FD"
PARENT = "DRIVETRAIN_SUPERVISOR_PID"
WARM = "DRIVETRAIN_WARM"
STDOUT, STDERR = "DRIVETRAIN_STDOUT", "DRIVETRAIN_STDERR"
_NEEDED = (
    "torch",
    "torch.distributed.checkpoint",
    "torch._dynamo",
)
_PUBLIC = ("Trainer", "prepare")  # what scripts import from the package, wherever it is defined


def main() -> None:
    """`python -m drivetrain.supervise.processes.worker SCRIPT ARGS…` or `… -m MODULE ARGS…`."""
    argv = sys.argv[1:]
    die_with_parent()
    if os.environ.pop(WARM, None):
        import_ahead(argv)
    if "torch" in sys.modules:
        _load_lazy_parts()
    _await_rank()
    _redirect()
    dump_responder.stay_ready()
    _leave(run_argv(argv))


def run_argv(argv: list[str]) -> int:
    """Run the script or module; return its exit code."""
    try:
        if argv[0] == "-m":
            sys.argv = argv[1:]
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = argv
            sys.path[0] = str(Path(argv[0]).resolve().parent)
            runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        sys.stderr.write(f"{error.code}\n")
        return 1
    except KeyboardInterrupt as error:
        if (
            "TORCHELASTIC_ERROR_FILE" in os.environ
        ):  # the script's own error, unless it was asked to stop
            leave_for_supervisor(error)
        return 130
    except BaseException as error:
        leave_for_supervisor(error)
        dump_responder.tell_collectives()
        if _collects_errors(sys.excepthook):
            sys.excepthook(type(error), error, error.__traceback__)
        return int(getattr(error, "exit_code", 1)) if _is_ours(error) else 1
    return 0


def _leave(code: int) -> None:
    """Exit as Python would, but without destroying all objects, which takes a second with torch."""
    settle_exit_code(code)
    with contextlib.suppress(Exception):
        threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001 - waits for threads
    atexit._run_exitfuncs()  # noqa: SLF001
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def die_with_parent() -> None:
    """Have the kernel kill this process when its supervisor dies."""
    parent = os.environ.pop(PARENT, None)
    if parent is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != int(parent):  # it died before the prctl call
        os._exit(1)


@without_collector()
def import_ahead(argv: list[str]) -> None:
    """Import what Drivetrain needs and what the script imports at top level; run nothing else."""
    from drivetrain.core.traits import all_traits  # loads pydantic, so only in a warm process

    for name in (*_NEEDED, *(each for traits in all_traits() for each in traits.preload)):
        importlib.import_module(name)
    package = importlib.import_module("drivetrain")
    for name in _PUBLIC:
        getattr(package, name)
    script = Path(argv[0]) if argv else None
    if script is None or not script.is_file():
        return
    for name in _top_imports(script.read_text()):
        if _is_installed(name):
            # an import that fails here will fail again in the script, where the user sees it
            with contextlib.suppress(Exception):
                importlib.import_module(name)


def _load_lazy_parts() -> None:
    """Use the parts of torch once that it loads lazily.

    No backward() and no optimizer.step(): both query the accelerator (autograd its devices, the
    optimizer its current stream), so every spare would open a context on the first device before it
    is known which device it will use.
    """
    import torch

    model = torch.nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.zero_grad()
    optimizer.state_dict()


def _is_installed(name: str) -> bool:
    """True for a library's module: the user's own could resolve differently from here."""
    try:
        found = importlib.util.find_spec(name.partition(".")[0])
    except (ImportError, ValueError):
        return False
    origin = "" if found is None else found.origin or ""
    return "site-packages" in origin or "dist-packages" in origin


def _top_imports(source: str) -> list[str]:
    """Return the modules that a script imports at top level."""
    names: list[str] = []
    try:
        statements = ast.parse(source).body
    except SyntaxError:
        return names
    for statement in statements:
        if isinstance(statement, ast.Import):
            names += [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            names.append(statement.module)
    return [name for name in names if name != "__future__"]


def _await_rank() -> None:
    """Wait for one line: the environment that makes this process a rank."""
    descriptor = os.environ.pop(CONTROL, None)
    if descriptor is None:
        return
    with os.fdopen(int(descriptor), "r") as control:
        line = control.readline()
    if not line:  # this process is not needed, or the supervisor is gone
        os._exit(0)
    os.environ.update(json.loads(line))
    if "torch" in sys.modules and "OMP_NUM_THREADS" in os.environ:
        import torch  # torch was imported before the variable was set

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def _redirect() -> None:
    """Redirect output to files if the user asked for it (--redirects, --tee)."""
    for name, stream in ((STDOUT, sys.stdout), (STDERR, sys.stderr)):
        path = os.environ.pop(name, None)
        if path is not None:
            stream.flush()
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(descriptor, stream.fileno())
            os.close(descriptor)


def leave_for_supervisor(error: BaseException) -> None:
    """Write the rank's error where its launcher looks for it, or to stderr if there is none."""
    text = _own_traceback(error)
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        sys.stderr.write(text)
        return
    # torchelastic's own format, so that its API finds the message and the time
    now_s = time.time()
    extra = {"py_callstack": text, "timestamp": str(int(now_s)), "at_s": now_s}
    document = {"message": {"message": text, "extraInfo": extra}}
    write_whole(Path(path), json.dumps(document))


def _own_traceback(error: BaseException) -> str:
    """The traceback without frames of this file and runpy; a config error needs no frames."""
    if _is_ours(error) and getattr(error, "problems", None):
        return f"{error}\n"  # it says where, what and what to do
    frames = error.__traceback__
    while frames is not None and _starts_scripts(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames or error.__traceback__))


def _collects_errors(hook: object) -> bool:
    """True for the user's own hook (Sentry, rich …); torch's would only print it with a prefix."""
    return hook is not sys.__excepthook__ and not getattr(hook, "__module__", "").startswith(
        "torch"
    )


def _starts_scripts(filename: str) -> bool:
    return filename == __file__ or "runpy" in filename


def _is_ours(error: BaseException) -> bool:
    """True for a DrivetrainError; compares names, so that nothing needs to be imported."""
    return any(
        kind.__module__.startswith("drivetrain.") and kind.__name__ == "DrivetrainError"
        for kind in type(error).__mro__
    )


if __name__ == "__main__":
    main()

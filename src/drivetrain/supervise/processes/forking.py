"""Starting processes by fork from one that has imported torch, instead of importing it again.

Importing torch takes seconds; a fork of a process that has imported it starts in milliseconds. Only
a process without Python threads that has not used an accelerator may be forked: neither a thread's
locks nor a driver's state survive a fork.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence

_FRESH = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
_DEVICE_MODULES = ("cuda", "xpu", "mtia", "mps")
"""torch's own device modules; an out-of-tree one is found by its registered name."""


class Forked:
    """A child process without a Popen: forked here, or adopted when its parent ended."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while it runs."""
        return self._reap(os.WNOHANG)

    def wait(self) -> int:
        """Wait for the process to end; return its exit code."""
        while (code := self._reap(0)) is None:
            pass
        return code

    def send_signal(self, number: int) -> None:
        """Signal the process only, not its group."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _reap(self, options: int) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, options)
            except ChildProcessError:
                self.returncode = -signal.SIGKILL
            else:
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


def fork_away(function: Callable[[], object], environment: Mapping[str, str]) -> int:
    """Like `fork_call`, but in a grandchild, which the subreaper adopts; return its pid."""
    reading, writing = os.pipe()

    def between() -> None:
        child = fork_call(function, environment)
        os.write(writing, str(child.pid).encode())

    fork_call(between, dict(os.environ)).wait()
    pid = int(os.read(reading, 32))  # not to its end: the grandchild has the other end too
    os.close(reading)
    os.close(writing)
    return pid


def can_fork() -> bool:
    """True if torch is imported here and forking is safe."""
    return "torch" in sys.modules and is_fork_safe()


def is_fork_safe() -> bool:
    """True if a forked child could do all that this process can."""
    return threading.active_count() == 1 and not has_touched_accelerator()


def has_touched_accelerator() -> bool:
    """True if this process has used a device driver; does not import torch to find out."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    out_of_tree = torch._C._get_privateuse1_backend_name()  # noqa: SLF001 - its only name
    found = (getattr(torch, name, None) for name in (*_DEVICE_MODULES, out_of_tree))
    modules = [module for module in found if module is not None]
    return any(_says(module, "is_initialized") for module in modules) or _spoils_child(modules)


def _spoils_child(modules: Sequence[object]) -> bool:
    """Check torch's bad-fork flag in a real child, where torch sets it.

    Counting devices, as torch.cuda.is_available() does, initializes the driver but not torch's own
    state, so the parent cannot tell.
    """
    pid = os.fork()
    if not pid:
        spoiled = True
        try:
            spoiled = any(_says(module, "_is_in_bad_fork") for module in modules)
        finally:
            os._exit(spoiled)
    return os.waitpid(pid, 0)[1] != 0


def _says(module: object, name: str) -> bool:
    return bool(getattr(module, name, bool)())


def fork_call(function: Callable[[], object], environment: Mapping[str, str]) -> Forked:
    """Run a function in a forked child with its own session, as if newly started."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return Forked(pid)
    code = 1
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in _FRESH:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.clear()
        os.environ.update(environment)
        tempfile.tempdir = None  # remembered from the parent's environment
        random.seed()
        function()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

"""One worker: imports everything once, then forks for each mutant. Lines of JSON in and out.

A child puts the mutant's code into the functions that are there already, which takes no import;
what runs on import, or does not fit, is imported anew. The mutated file lies in the worker's own
copy of the project meanwhile, so that processes which a test starts have the mutant too.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest

from tests.mutation.scope import GROUPS, Group

_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER: whom a test leaves behind becomes the worker's child
_OPTIONS = ["-x", "-o", "addopts=", "-p", "no:cacheprovider", "--hypothesis-profile=ci"]
_ONE_TEST_S = 90
"""Of the tests that are chosen, none takes half of it."""


class _FirstFailure:
    """A pytest plugin: who noticed."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self._path.write_text(report.nodeid)


def serve(group: Group) -> None:
    """Until nobody asks any more."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    log = os.open("worker.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    options = [*_OPTIONS, "-o", f"timeout={_ONE_TEST_S}", *group.options]
    pytest.main([*options, "--collect-only", "-q", *group.tests])
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    functions = _functions(Path("src").absolute())
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        out.write(json.dumps(_try(json.loads(line), functions, options)) + "\n")


def _try(
    asked: dict[str, Any], functions: dict[str, list[FunctionType]], options: list[str]
) -> dict[str, Any]:
    path = Path(asked["file"]).absolute()
    original, stat = path.read_bytes(), path.stat()
    killer = Path("killer")
    killer.write_text("")
    began = time.monotonic()
    path.write_text(asked["text"])
    try:
        pid = os.fork()
        if pid == 0:
            _child(asked, path, functions.get(str(path), []), [*options, *asked["tests"]], killer)
        code = _wait(pid, asked["limit_s"])
    finally:
        _end_children()
        path.write_bytes(original)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    status = "timed out" if code is None else "survived" if code == 0 else "killed"
    return {
        "status": status,
        "by": killer.read_text(),
        "code": code,
        "seconds": round(time.monotonic() - began, 2),
    }


def _child(
    asked: dict[str, Any],
    path: Path,
    functions: list[FunctionType],
    words: list[str],
    killer: Path,
) -> None:
    code = 99
    try:
        if not _replaced(asked["text"], asked["function"], path, functions):
            for name in [n for n in sys.modules if n.partition(".")[0] in ("drivetrain", "tests")]:
                del sys.modules[name]
        code = int(pytest.main(words, plugins=[_FirstFailure(killer)]))
    finally:
        os._exit(code)


def _replaced(text: str, function: str, path: Path, functions: list[FunctionType]) -> bool:
    """Whether the mutated function is in place of the one that was imported."""
    if not function:
        return False
    new = [c for c in _codes(compile(text, str(path), "exec")) if c.co_qualname == function]
    old: dict[int, list[FunctionType]] = {}
    for each in functions:
        if each.__code__.co_qualname == function:
            old.setdefault(each.__code__.co_firstlineno, []).append(each)
    if not old or len(old) != len(new):
        return False
    try:
        for code, (_, same) in zip(new, sorted(old.items()), strict=True):
            for each in same:
                each.__code__ = code
    except ValueError:  # it closes over other variables now
        return False
    return True


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)


def _functions(source: Path) -> dict[str, list[FunctionType]]:
    """Every function of the project there is, by its file."""
    found: dict[str, list[FunctionType]] = {}
    for each in gc.get_objects():
        if isinstance(each, FunctionType) and each.__code__.co_filename.startswith(str(source)):
            found.setdefault(each.__code__.co_filename, []).append(each)
    return found


def _wait(pid: int, limit_s: float) -> int | None:
    """Its exit code; None when it took too long and was ended."""
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    return None


def _end_children() -> None:
    """Whoever is left, its orphans too."""
    while True:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            pids = [int(pid) for pid in file.read().split()]
        if not pids:
            return
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


if __name__ == "__main__":
    serve(GROUPS[sys.argv[1]])

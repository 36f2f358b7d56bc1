"""Processes without a process group: they share a store, and a check stops and kills them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import TCPStore

from drivetrain.core.processes import end_child
from drivetrain.learn.attempt import Shortcoming, as_shortcoming, import_once, line_in, load

_PATIENCE = timedelta(seconds=10)


class Members:
    """The processes of one check; none of them outlives it."""

    def __init__(self, file: Path) -> None:
        import_once()
        self._file = file
        self.store = new_store(0, is_master=True)
        self._started: dict[str, tuple[BaseProcess, Connection]] = {}
        self._killed: set[str] = set()
        self._told: dict[str, Any] = {}
        """Error and value that finished members have sent."""

    def __enter__(self) -> Members:
        return self

    def __exit__(self, *_: object) -> None:
        for process, receiver in self._started.values():
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGCONT)
            end_child(process)
            receiver.close()

    def start(self, name: str, scenario: Callable[..., Any], *args: Any) -> None:
        """Run `scenario(learner's module, store, *args)` in its own process."""
        context = multiprocessing.get_context("forkserver")
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(
            target=_member, args=(sender, str(self._file), self.store.port, scenario, args)
        )
        process.start()
        sender.close()
        self._started[name] = (process, receiver)

    def send_signal(self, name: str, number: signal.Signals) -> None:
        pid = self._started[name][0].pid
        if pid is None:
            raise ProcessLookupError(name)
        os.kill(pid, number)
        if number == signal.SIGKILL:
            self._killed.add(name)

    def has_ended(self, name: str, within_s: float) -> bool:
        self._started[name][0].join(within_s)
        return not self._started[name][0].is_alive()

    def result(self, name: str, within_s: float) -> Any:
        """Return what the scenario returned; Shortcoming if it failed or is late."""
        _, receiver = self._started[name]
        if name not in self._told:
            if not receiver.poll(within_s):
                expected = f"{name} finishes within seconds"
                raise Shortcoming("endless", expected, f"still waiting after {within_s:g} s")
            try:
                self._told[name] = receiver.recv()
            except EOFError:
                raise Shortcoming("crash", f"{name} exits normally", "it ended abruptly") from None
        error, value = self._told[name]
        if error is not None:
            kind, text, line = error
            raise as_shortcoming(kind, text, self._file, line, name)
        return value

    def failed(self) -> None:
        """Raise the Shortcoming of a member that has already failed, if any."""
        for name, (_, receiver) in self._started.items():
            if name not in self._killed and receiver.poll(0):
                self.result(name, 0)


def new_store(port: int, is_master: bool = False) -> TCPStore:
    return TCPStore(
        "127.0.0.1", port, is_master=is_master, wait_for_workers=False, timeout=_PATIENCE
    )


def wait_until(condition: Callable[[], bool], within_s: float) -> bool:
    deadline_s = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.02)
    return True


def _member(
    sender: Connection, file: str, port: int, scenario: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    try:
        value = scenario(load(Path(file)), new_store(port), *args)
    except Exception as error:
        line = line_in(error, Path(file))
        sender.send(((type(error).__name__, str(error), line), None))
    else:
        sender.send((None, value))

"""Links: point-to-point pushes and replies between this rank and all others.

A thread receives pushes at any time, so a rank with a slow step still serves the others. It uses
its own process group, on which it may wait indefinitely; a wait for a reply takes at most
`parallel.timeout_s`.
"""

from __future__ import annotations

import atexit
import queue
import struct
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from drivetrain.core.processes import is_failing
from drivetrain.parallel.world import World
from drivetrain.strategies.parameter_server.messages import Push, Reply
from drivetrain.strategies.parameter_server.server import Server

_PUSH, _GRADIENTS, _REPLY, _WEIGHTS = 1, 2, 3, 4
"""Message tags."""
_STOP = -1
"""Sent instead of a clock: this worker sends no more pushes."""
_FOR_EVER = timedelta(days=365)
_LOOKS_EVERY_S = 0.5
_PATIENCE_S = 10.0


class Links:
    """The links of one rank. Call `serve` when its server exists."""

    def __init__(self, world: World, num_groups: int, timeout_s: float) -> None:
        self._rank = world.rank
        self._others = [r for r in range(world.layout.world_size) if r != world.rank]
        self._timeout = timedelta(seconds=timeout_s)
        self._num_groups = num_groups
        self._group = None
        if self._others:
            self._group = dist.new_group(backend="gloo", timeout=_FOR_EVER)
        self._server: Server | None = None
        self._is_open = threading.Event()
        self._failure: BaseException | None = None
        self._own_replies: queue.SimpleQueue[Reply] = queue.SimpleQueue()
        self._sent: dict[int, list[tuple[Any, torch.Tensor]]] = {}
        """By worker: the last reply, kept until it is sent."""
        self._expected: dict[int, tuple[Any, torch.Tensor]] = {}
        """By server: the reply that is being received."""
        self._pushed: list[tuple[Any, torch.Tensor]] = []
        self.sent_bytes = 0
        """Sent by this rank, as worker and as server."""
        self._thread: threading.Thread | None = None

    def serve(self, server: Server) -> None:
        """Start to receive other ranks' pushes; they wait until `open` is called."""
        self._server = server
        if self._others:
            self._thread = threading.Thread(target=self._run, name="parameter server", daemon=True)
            self._thread.start()
            atexit.register(self.stop)

    def open(self) -> None:
        self._is_open.set()

    def close(self) -> None:
        """Let pushes wait again, because the weights are about to be replaced."""
        self._is_open.clear()

    @property
    def is_open(self) -> bool:
        return self._is_open.is_set()

    # As a worker.

    def push(self, server: int, push: Push) -> None:
        """Send gradients to a server, which may be this rank's own."""
        if server == self._rank:
            if self._server is None:
                raise RuntimeError("this rank has no server")
            self._server.receive(push)
            return
        reply = torch.empty(3, dtype=torch.int64)
        self._expected[server] = (self._irecv(reply, server, _REPLY), reply)
        size = -1 if push.gradients is None else len(push.gradients)
        numbers = [push.clock, push.pulled, int(push.wants_weights), size]
        self._pushed.append(self._isend(_header(numbers, push.rates), server, _PUSH))
        if push.gradients is not None:
            self._pushed.append(self._isend(push.gradients, server, _GRADIENTS))

    def reply_of(self, server: int) -> Reply:
        """Wait for the reply to the last push and return it."""
        if server == self._rank:
            return self._own_reply()
        work, numbers = self._expected.pop(server)
        work.wait(self._timeout)
        version, staleness, size = numbers.tolist()
        weights = None
        if size >= 0:
            weights = torch.empty(size, dtype=torch.uint8)
            self._irecv(weights, server, _WEIGHTS).wait(self._timeout)
        return Reply(version, staleness, weights)

    def finish_pushes(self) -> None:
        """Complete the sends. Call it after all replies, when it does not have to wait."""
        for work, _ in self._pushed:
            work.wait(self._timeout)
        self._pushed = []

    def wait_for(self, event: threading.Event) -> None:
        """Wait for an event of this rank's own server, which waits for other ranks."""
        end_s = time.monotonic() + self._timeout.total_seconds()
        while not event.wait(_LOOKS_EVERY_S):
            self._look(end_s)

    def _own_reply(self) -> Reply:
        end_s = time.monotonic() + self._timeout.total_seconds()
        while True:
            try:
                return self._own_replies.get(timeout=_LOOKS_EVERY_S)
            except queue.Empty:
                self._look(end_s)

    def _look(self, end_s: float) -> None:
        if self._failure is not None:
            raise RuntimeError(f"the parameter server of rank {self._rank} has failed") from (
                self._failure
            )
        if time.monotonic() > end_s:
            waited = f"{self._timeout.total_seconds():.0f} s (parallel.timeout_s)"
            raise TimeoutError(f"slower ranks have pushed no gradients for {waited}")

    # As a server.

    def answer(self, worker: int, reply: Reply) -> None:
        """Send a reply without waiting: the worker may be waiting for other servers first."""
        if worker == self._rank:
            self._own_replies.put(reply)
            return
        for work, _ in self._sent.pop(worker, []):  # received, since the worker has pushed again
            work.wait(self._timeout)
        size = -1 if reply.weights is None else len(reply.weights)
        numbers = torch.tensor([reply.version, reply.staleness, size], dtype=torch.int64)
        sent = [self._isend(numbers, worker, _REPLY)]
        if reply.weights is not None:
            sent.append(self._isend(reply.weights, worker, _WEIGHTS))
        self._sent[worker] = sent

    def _run(self) -> None:
        try:
            left = len(self._others)
            while left:
                push = self._next_push()
                if push is None:
                    left -= 1
                    continue
                self._is_open.wait()
                if self._server is not None:
                    self._server.receive(push)
        except BaseException as error:
            self._failure = error

    def _next_push(self) -> Push | None:
        header = torch.empty(4 + self._num_groups, dtype=torch.int64)
        worker = dist.recv(header, None, group=self._group, tag=_PUSH)
        clock, pulled, wants_weights, size, *rates = header.tolist()
        if clock == _STOP:
            return None
        gradients = None
        if size >= 0:
            gradients = torch.empty(size, dtype=torch.uint8)
            self._irecv(gradients, worker, _GRADIENTS).wait(self._timeout)
        return Push(worker, clock, pulled, bool(wants_weights), _floats(rates), gradients)

    def stop(self) -> None:
        """At process exit: notify the other servers, and wait until all have notified this one."""
        if self._thread is None or is_failing() or self._failure is not None:
            return
        self._is_open.set()
        goodbye = _header([_STOP, 0, 0, -1], (0.0,) * self._num_groups)
        last = [self._isend(goodbye, other, _PUSH) for other in self._others]
        self._thread.join(_PATIENCE_S)
        if not self._thread.is_alive():
            with suppress(RuntimeError):  # a rank that was notified by all may have exited
                for work, _ in last:
                    work.wait(timedelta(seconds=_PATIENCE_S))

    def _isend(self, tensor: torch.Tensor, to: int, tag: int) -> tuple[Any, torch.Tensor]:
        self.sent_bytes += tensor.nbytes
        return dist.isend(tensor, to, group=self._group, tag=tag), tensor

    def _irecv(self, tensor: torch.Tensor, source: int, tag: int) -> Any:
        return dist.irecv(tensor, source, group=self._group, tag=tag)


def _header(numbers: list[int], rates: tuple[float, ...]) -> torch.Tensor:
    """Pack integers and the bit patterns of learning rates into one tensor."""
    as_numbers = struct.unpack(f"{len(rates)}q", struct.pack(f"{len(rates)}d", *rates))
    return torch.tensor([*numbers, *as_numbers], dtype=torch.int64)


def _floats(numbers: list[int]) -> tuple[float, ...]:
    return struct.unpack(f"{len(numbers)}d", struct.pack(f"{len(numbers)}q", *numbers))

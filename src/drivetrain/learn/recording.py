"""Record every message that a learner's code sends: in the rank, one line per call.

The functions of torch.distributed are wrapped before the learner's file is imported. Bytes are
counted, a call that waits too long is named, and two mistakes that often go unnoticed are exposed:
what `irecv` receives is delivered by `wait` and not before, and a tensor that changes between
`isend` and `wait` is detected.
"""

from __future__ import annotations

import inspect
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

PATIENCE_S = 12.0
"""Time limit of a message, which takes milliseconds between processes of one machine."""

_TENSORS: dict[str, Callable[[tuple[Any, ...]], Any]] = {
    # which arguments are a collective's tensors; the first is the whole that `passes` speaks of
    "all_reduce": lambda args: args[0],
    "broadcast": lambda args: args[0],
    "reduce": lambda args: args[0],
    "all_gather": lambda args: list(args[0]),
    "all_gather_into_tensor": lambda args: args[0],
    "reduce_scatter": lambda args: list(args[1]),
    "reduce_scatter_tensor": lambda args: args[1],
    "all_to_all": lambda args: list(args[1]),
    "all_to_all_single": lambda args: args[1],
    "gather": lambda args: args[0],
    "scatter": lambda args: args[0],
}
_OF_OBJECTS = ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list")


class Stuck(Exception):
    """A call waited longer than any message takes."""


class Recorder:
    """One rank's log, and the wrapped functions that write it."""

    def __init__(self, log: Path, learner_file: Path) -> None:
        self._log: TextIO = log.open("w", buffering=1)
        self._file = str(learner_file)
        self._next = 0
        self._is_on = True
        self._link: tuple[float, float] | None = None
        self.requests: list[object] = []
        """Kept: gloo cancels unreferenced requests, which would look like another mistake."""

    def section(self, name: str) -> None:
        """Begin a section, which is judged separately."""
        self._write({"section": name})

    def stop(self) -> None:
        """Stop recording: what follows is not the learner's code."""
        self._is_on = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not record inside this context: for the check's own messages."""
        before, self._is_on = self._is_on, False
        try:
            yield
        finally:
            self._is_on = before

    @contextmanager
    def slow_link(self, latency_s: float, bytes_per_s: float) -> Iterator[None]:
        """Delay messages, as over a link of known speed."""
        self._link = (latency_s, bytes_per_s)
        try:
            yield
        finally:
            self._link = None

    def error(self, error: BaseException, line: int) -> None:
        kind = type(error).__name__
        self._write({"error": kind, "text": str(error), "line": line})

    def note(self, **values: Any) -> None:
        """Record something for the check itself."""
        self._write({"note": values})

    def mark(self, name: str) -> None:
        """Mark a moment between the learner's calls."""
        self._write({"mark": name, "before": self._next})

    def install(self) -> None:
        """Replace torch's functions by the wrapped ones."""
        wrapped: dict[str, Callable[..., Any]] = {
            "isend": self._isend(dist.isend),
            "irecv": self._irecv(dist.irecv),
        }
        wrapped["send"] = self._blocking(dist.send, wrapped["isend"])
        wrapped["recv"] = self._blocking_recv(dist.recv, wrapped["irecv"])
        for name in (*_TENSORS, *_OF_OBJECTS, "barrier"):
            wrapped[name] = self._collective(name, getattr(dist, name))
        for name, function in wrapped.items():
            setattr(dist, name, function)
            setattr(distributed_c10d, name, function)

    def line(self) -> int:
        """Return the learner's line that is running; 0 if there is none."""
        frame = sys._getframe(1)  # noqa: SLF001 - the documented way to a caller's line
        while frame is not None:
            if frame.f_code.co_filename == self._file:
                return frame.f_lineno
            frame = frame.f_back  # type: ignore[assignment]
        return 0

    def posted(
        self,
        kind: str,
        peer: int | None,
        num_bytes: int,
        tag: int = 0,
        ranks: tuple[int, ...] = (),
        left_bytes: int | None = None,
        elements: str = "",
    ) -> int:
        index, self._next = self._next, self._next + 1
        self._write(
            {
                "call": index,
                "kind": kind,
                "peer": peer,
                "bytes": num_bytes,
                "tag": tag,
                "line": self.line(),
                "ranks": ranks,
                "left": left_bytes,
                "elements": elements,
            }
        )
        return index

    def done(self, index: int, peer: int | None = None, changed: bool = False) -> None:
        self._write({"done": index, "peer": peer, "changed": changed})

    def _write(self, values: dict[str, Any]) -> None:
        self._log.write(json.dumps(values) + "\n")

    def _isend(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def isend(
            tensor: torch.Tensor,
            dst: int | None = None,
            group: Any = None,
            tag: int = 0,
            group_dst: int | None = None,
        ) -> Any:
            if not self._is_on:
                return original(tensor, dst, group, tag, group_dst)
            _check_contiguous(tensor, "isend")
            peer = _global_rank(dst, group, group_dst)
            index = self.posted("send", peer, _size(tensor), tag, elements=_elements(tensor))
            if self._link is not None:
                latency_s, bytes_per_s = self._link
                takes_s = latency_s + _size(tensor) / bytes_per_s
                work = _LateWork(takes_s, lambda: original(tensor, dst, group, tag, group_dst))
            else:
                work = original(tensor, dst, group, tag, group_dst)
            return SendRequest(self, index, work, tensor)

        return isend

    def _irecv(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def irecv(
            tensor: torch.Tensor,
            src: int | None = None,
            group: Any = None,
            tag: int = 0,
            group_src: int | None = None,
        ) -> Any:
            if not self._is_on:
                return original(tensor, src, group, tag, group_src)
            _check_contiguous(tensor, "irecv")
            is_any = src is None and group_src is None
            peer = None if is_any else _global_rank(src, group, group_src)
            index = self.posted("recv", peer, _size(tensor), tag, elements=_elements(tensor))
            arriving = torch.empty_like(tensor)
            work = original(arriving, src, group, tag, group_src)
            return ReceiveRequest(self, index, work, arriving, tensor, peer)

        return irecv

    def _blocking(
        self, original: Callable[..., Any], asynchronous: Callable[..., Any]
    ) -> Callable[..., Any]:
        def send(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            if not self._is_on:
                original(tensor, *args, **kwargs)
                return
            asynchronous(tensor, *args, **kwargs).wait()

        return send

    def _blocking_recv(
        self, original: Callable[..., Any], asynchronous: Callable[..., Any]
    ) -> Callable[..., Any]:
        def recv(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> int:
            if not self._is_on:
                return int(original(tensor, *args, **kwargs))
            request = asynchronous(tensor, *args, **kwargs)
            request.wait()
            return int(request.peer)

        return recv

    def _collective(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def collective(*args: Any, **kwargs: Any) -> Any:
            if not self._is_on:
                return original(*args, **kwargs)
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            index = self.posted(
                name,
                None,
                _collective_bytes(name, given.args),
                ranks=_group_ranks(given.arguments.get("group")),
                left_bytes=_left_bytes(name, given.arguments),
            )
            is_async = kwargs.pop("async_op", False)
            if name in _OF_OBJECTS:
                original(*args, **kwargs)
                self.done(index)
                return None
            request = CollectiveRequest(self, index, original(*args, async_op=True, **kwargs))
            if is_async:
                return request
            request.wait()
            return None

        return collective


class _LateWork:
    """A send that is delayed while the rank continues."""

    def __init__(self, takes_s: float, send: Callable[[], Any]) -> None:
        self._send = send
        self._work: Any = None
        self._due_s = time.perf_counter() + takes_s
        self._thread = threading.Thread(target=self._go, daemon=True)
        self._thread.start()

    def _go(self) -> None:
        time.sleep(max(0.0, self._due_s - time.perf_counter()))
        self._work = self._send()

    def wait(self, timeout: timedelta) -> None:
        self._thread.join(timeout.total_seconds())
        self._work.wait(timeout)

    def is_completed(self) -> bool:
        return self._work is not None and bool(self._work.is_completed())


class _Request:
    """The request that an asynchronous call returns."""

    def __init__(self, recorder: Recorder, index: int, work: Any) -> None:
        self._recorder = recorder
        self._index = index
        self._work = work
        self._is_over = False
        recorder.requests.append(self)

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self._is_over:
            patience = timeout or timedelta(seconds=PATIENCE_S)
            begun_s = time.monotonic()
            try:
                self._work.wait(patience)
            except RuntimeError as error:
                if time.monotonic() - begun_s < patience.total_seconds() * 0.9:
                    raise
                raise Stuck(f"waited {patience.total_seconds():g} s") from error
            self._is_over = True
            self._finish()
            # References kept here would count as memory held by the learner's code.
            self._work = None
            self._recorder.requests.remove(self)
        return True

    def is_completed(self) -> bool:
        return self._is_over or bool(self._work.is_completed())

    def _finish(self) -> None:
        self._recorder.done(self._index)


class SendRequest(_Request):
    """Of `isend`: the tensor must not change until `wait`."""

    def __init__(self, recorder: Recorder, index: int, work: Any, tensor: torch.Tensor) -> None:
        super().__init__(recorder, index, work)
        self._tensor = tensor
        self._sent = tensor.detach().clone()

    def _finish(self) -> None:
        is_same = torch.equal(
            self._sent.view(torch.uint8) if self._sent.numel() else self._sent,
            self._tensor.detach().view(torch.uint8) if self._sent.numel() else self._sent,
        )
        self._recorder.done(self._index, changed=not is_same)
        del self._tensor, self._sent


class ReceiveRequest(_Request):
    """Of `irecv`: the tensor has its values after `wait`, and only then."""

    def __init__(
        self,
        recorder: Recorder,
        index: int,
        work: Any,
        arriving: torch.Tensor,
        tensor: torch.Tensor,
        peer: int | None,
    ) -> None:
        super().__init__(recorder, index, work)
        self._arriving = arriving
        self._tensor = tensor
        self.peer = peer

    def _finish(self) -> None:
        if self.peer is None:
            self.peer = int(self._work._source_rank())  # noqa: SLF001 - torch's only way to it
        with torch.no_grad():
            self._tensor.copy_(self._arriving)
        self._recorder.done(self._index, self.peer)
        del self._arriving, self._tensor


class CollectiveRequest(_Request):
    """Of a collective with `async_op=True`."""

    def get_future(self) -> Any:
        return self._work.get_future()


def _global_rank(rank: int | None, group: Any, group_rank: int | None) -> int:
    if rank is not None:
        return rank
    if group_rank is None:
        raise ValueError("no rank is given: pass dst or src")
    if group is None or group is dist.group.WORLD:
        return group_rank
    return int(dist.get_global_rank(group, group_rank))


def _check_contiguous(tensor: torch.Tensor, call: str) -> None:
    if not tensor.is_contiguous():
        raise ValueError(f"{call} needs a contiguous tensor, and this view is not contiguous")


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _elements(tensor: torch.Tensor) -> str:
    return f"{tensor.numel()} {str(tensor.dtype).removeprefix('torch.')}"


def _collective_bytes(name: str, args: tuple[Any, ...]) -> int:
    if not args or name not in _TENSORS:
        return 0
    found = _TENSORS[name](args)
    return sum(_size(each) for each in (found if isinstance(found, list) else [found]))


def _group_ranks(group: Any) -> tuple[int, ...]:
    if group is None or group is dist.group.WORLD:
        return ()
    return tuple(dist.get_process_group_ranks(group))


def _left_bytes(name: str, given: dict[str, Any]) -> int | None:
    """Bytes that leave the rank in an uneven all-to-all: all but its own part."""
    if name != "all_to_all_single" or not given["input_split_sizes"]:
        return None
    sizes: list[int] = list(given["input_split_sizes"])
    tensor: torch.Tensor = given["input"]
    others = sum(sizes) - int(sizes[dist.get_rank(given["group"])])
    return others * (_size(tensor) // max(1, tensor.shape[0]))

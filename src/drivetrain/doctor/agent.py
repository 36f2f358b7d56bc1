"""The doctor's agent on one host: `python -m drivetrain.doctor.agent`.

It receives requests as lines of JSON on its standard input or as files in a directory
(`channels.py`), and replies the same way. Nothing here imports torch.
"""

from __future__ import annotations

import errno
import json
import re
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from drivetrain.doctor.facts import Dial
from drivetrain.doctor.host import host_facts
from drivetrain.doctor.network import resolve

# A real connection between two hosts: one listens, the other connects and measures.

_PATIENCE_S = 3.0
_PING, _STREAM = b"p", b"s"
_PING_BYTES, _NUM_PINGS = 64, 30
_CHUNK = bytes(2**18)
_STREAM_S, _MOST_BYTES = 0.4, 2**30
_RESULT = struct.Struct("<Qd")


class Listener:
    """Answers pings and consumes streams on some ports until it is closed."""

    def __init__(self, ports: Sequence[int]) -> None:
        self._closing = threading.Event()
        self._servers: list[socket.socket] = []
        self.ports: dict[int, int] = {}
        """Requested → opened port (0 requests any free one); ports in use are left out."""
        for port in ports:
            try:
                server = socket.create_server(("", port), backlog=64)
            except OSError:
                continue
            server.settimeout(0.1)
            self._servers.append(server)
            self.ports[port] = server.getsockname()[1]
        self._threads = [
            threading.Thread(target=self._accept, args=(server,), daemon=True)
            for server in self._servers
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop, and release the ports."""
        self._closing.set()
        for thread in self._threads:
            thread.join()
        for server in self._servers:
            server.close()

    def _accept(self, server: socket.socket) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = server.accept()
            except TimeoutError:
                continue
            threading.Thread(target=_serve, args=(connection,), daemon=True).start()


def _serve(connection: socket.socket) -> None:
    with connection:
        connection.settimeout(_PATIENCE_S)
        try:
            kind = connection.recv(1)
            if kind == _PING:
                while data := connection.recv(_PING_BYTES):
                    connection.sendall(data)
            elif kind == _STREAM:
                connection.sendall(_RESULT.pack(*_swallow(connection)))
        except OSError:
            return  # the other side sees the error too, and reports it


def _swallow(connection: socket.socket) -> tuple[int, float]:
    """Receive until end of stream; return the bytes after the first read, and the seconds."""
    buffer = bytearray(len(_CHUNK))
    num_bytes = connection.recv_into(buffer)
    began = time.perf_counter()
    first = num_bytes
    while received := connection.recv_into(buffer):
        num_bytes += received
    return num_bytes - first, time.perf_counter() - began


def dial(purpose: str, address: str, port: int) -> Dial:
    """Connect once; the result's error is one word, or None if it worked."""
    try:
        socket.create_connection((address, port), timeout=_PATIENCE_S).close()
    except TimeoutError:
        return Dial(purpose, address, port, "silent")
    except OSError as error:
        return Dial(purpose, address, port, _word(error))
    return Dial(purpose, address, port, None)


def _word(error: OSError) -> str:
    words = {
        errno.ECONNREFUSED: "refused",
        errno.EHOSTUNREACH: "unreachable",
        errno.ENETUNREACH: "unreachable",
        errno.ETIMEDOUT: "silent",
    }
    return words.get(error.errno or 0, error.strerror or str(error))


def latency(address: str, port: int) -> float | None:
    """Return half the median round trip in seconds; None if the connection fails."""
    times = []
    try:
        with socket.create_connection((address, port), timeout=_PATIENCE_S) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(_PING)
            for _ in range(_NUM_PINGS):
                began = time.perf_counter()
                connection.sendall(bytes(_PING_BYTES))
                _receive(connection, _PING_BYTES)
                times.append(time.perf_counter() - began)
    except OSError:
        return None
    return median(times) / 2


def bytes_per_second(address: str, port: int) -> float | None:
    """Return one stream's rate as the receiver saw it; None if the connection fails."""
    try:
        with socket.create_connection((address, port), timeout=_PATIENCE_S) as connection:
            connection.sendall(_STREAM)
            sent, until = 0, time.perf_counter() + _STREAM_S
            while time.perf_counter() < until and sent < _MOST_BYTES:
                connection.sendall(_CHUNK)
                sent += len(_CHUNK)
            connection.shutdown(socket.SHUT_WR)
            # the buffers must first drain through what may be a slow link
            connection.settimeout(10 * _PATIENCE_S)
            num_bytes, seconds = _RESULT.unpack(_receive(connection, _RESULT.size))
    except OSError:
        return None
    return float(num_bytes / seconds) if seconds > 0 else None


def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        piece = connection.recv(num_bytes - len(data))
        if not piece:
            raise ConnectionError("closed early")
        data += piece
    return data


TOKEN = re.compile(r"\.drivetrain-doctor-[0-9a-f]{8}")
"""Names of the files that test whether other hosts see a directory."""
CALLS = frozenset(
    {
        "facts",
        "clock",
        "listen",
        "close_ports",
        "resolve",
        "dial",
        "measure",
        "leave",
        "sees",
        "clear",
    }
)


class Agent:
    """Each public method is a request; arguments and return values are JSON."""

    def __init__(self) -> None:
        self._listener: Listener | None = None
        self._left: set[Path] = set()

    def facts(self, ports: Sequence[int], places: Sequence[str]) -> dict[str, Any]:
        return asdict(host_facts(ports, places))

    def clock(self) -> float:
        """Return this host's time, in seconds since the epoch."""
        return time.time()

    def listen(self, ports: Sequence[int]) -> dict[str, int]:
        """Open ports for others to connect to; ports in use are left out of the reply."""
        self.close_ports()
        self._listener = Listener(ports)
        return {str(asked): opened for asked, opened in self._listener.ports.items()}

    def close_ports(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def resolve(self, name: str) -> list[str]:
        """Return the addresses that a name resolves to on this host."""
        return list(resolve(name))

    def dial(self, purpose: str, address: str, port: int) -> dict[str, Any]:
        return asdict(dial(purpose, address, port))

    def measure(self, address: str, port: int) -> dict[str, float | None]:
        """Measure latency and rate to a listener."""
        return {
            "latency_s": latency(address, port),
            "bytes_per_s": bytes_per_second(address, port),
        }

    def leave(self, folder: str, name: str) -> str:
        """Write a small file that the other hosts should see; return its directory.

        That is the nearest existing parent, since the run creates its own directory.
        """
        whole = Path(folder).absolute()
        existing = next(each for each in (whole, *whole.parents) if each.is_dir())
        path = existing / _checked(name)
        with path.open("x", encoding="utf-8") as file:  # never overwrite a file or follow a link
            file.write("drivetrain doctor\n")
        self._left.add(path)
        return str(existing)

    def sees(self, folder: str, name: str) -> bool:
        """Whether this host sees the file; a shared file system may need a second."""
        path = Path(folder) / _checked(name)
        for _ in range(20):
            if path.exists():
                return True
            time.sleep(0.1)
        return False

    def clear(self, folder: str, name: str) -> None:
        """Delete the file, if this agent created it."""
        path = Path(folder) / name
        if path not in self._left:
            raise ValueError(f"this agent did not create {path}")
        path.unlink(missing_ok=True)


def answer(agent: Agent, request: Mapping[str, Any]) -> dict[str, Any]:
    """Handle one request; errors are returned as replies."""
    name = request.get("call")
    if name not in CALLS:
        return {"error": f"this agent does not know {name!r}; is an older Drivetrain there?"}
    method: Callable[..., Any] = getattr(agent, name)
    try:
        return {"answer": method(**request["with"])}
    except Exception as error:  # the client decides what an error means
        return {"error": f"{type(error).__name__}: {error}"}


def _checked(name: str) -> str:
    if not TOKEN.fullmatch(name):
        raise ValueError(f"{name!r} is not a name for a file of the doctor")
    return name


def main() -> None:
    """Serve requests until standard input is closed."""
    agent = Agent()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(answer(agent, json.loads(line))) + "\n")
        sys.stdout.flush()
    agent.close_ports()


if __name__ == "__main__":
    main()

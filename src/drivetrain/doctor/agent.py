"""The doctor's hands on one host: `python -m drivetrain.doctor.agent`.

It is told what to do in lines of JSON, on its input or by files in a folder (`channels.py`), and
answers in kind. It stays out of torch's way: nothing here imports it.
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

# The way between two hosts, tried for real: one listens, the other dials and measures.

_PATIENCE_S = 3.0
_PING, _STREAM = b"p", b"s"
_PING_BYTES, _NUM_PINGS = 64, 30
_CHUNK = bytes(2**18)
_STREAM_S, _MOST_BYTES = 0.4, 2**30
_RESULT = struct.Struct("<Qd")


class Listener:
    """Answers pings and swallows streams on some ports until it is closed."""

    def __init__(self, ports: Sequence[int]) -> None:
        self._closing = threading.Event()
        self._servers: list[socket.socket] = []
        self.ports: dict[int, int] = {}
        """Asked for → opened (0 asks for any free one); a port that is held is left out."""
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
        """Stop, and give the ports back."""
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
            return  # the other side sees it, too, and says so


def _swallow(connection: socket.socket) -> tuple[int, float]:
    """Bytes until the other side has no more, and the time from the first to the last."""
    buffer = bytearray(len(_CHUNK))
    num_bytes = connection.recv_into(buffer)
    began = time.perf_counter()
    first = num_bytes
    while received := connection.recv_into(buffer):
        num_bytes += received
    return num_bytes - first, time.perf_counter() - began


def dial(purpose: str, address: str, port: int) -> Dial:
    """Connect once, and say what came of it in one word."""
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
    """Half a round trip, the median of many; None when the connection does not last."""
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
    """What one stream carries, as the receiver saw it; None when the connection does not last."""
    try:
        with socket.create_connection((address, port), timeout=_PATIENCE_S) as connection:
            connection.sendall(_STREAM)
            sent, until = 0, time.perf_counter() + _STREAM_S
            while time.perf_counter() < until and sent < _MOST_BYTES:
                connection.sendall(_CHUNK)
                sent += len(_CHUNK)
            connection.shutdown(socket.SHUT_WR)
            # what is still in the buffers has to drain through a slow link first
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
"""The name of a file that is left for others to see."""
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
    """Each public method is a request; arguments and answers are JSON."""

    def __init__(self) -> None:
        self._listener: Listener | None = None
        self._left: set[Path] = set()

    def facts(self, ports: Sequence[int], places: Sequence[str]) -> dict[str, Any]:
        return asdict(host_facts(ports, places))

    def clock(self) -> float:
        """This host's idea of now."""
        return time.time()

    def listen(self, ports: Sequence[int]) -> dict[str, int]:
        """Open ports to be dialled; those that are held are left out of the answer."""
        self.close_ports()
        self._listener = Listener(ports)
        return {str(asked): opened for asked, opened in self._listener.ports.items()}

    def close_ports(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def resolve(self, name: str) -> list[str]:
        """The addresses of a name as this host sees it."""
        return list(resolve(name))

    def dial(self, purpose: str, address: str, port: int) -> dict[str, Any]:
        return asdict(dial(purpose, address, port))

    def measure(self, address: str, port: int) -> dict[str, float | None]:
        """Latency and rate to a listener."""
        return {
            "latency_s": latency(address, port),
            "bytes_per_s": bytes_per_second(address, port),
        }

    def leave(self, folder: str, name: str) -> str:
        """Put a small file where the others should see it; the folder it went to.

        That is the nearest one that exists: the run makes its own.
        """
        whole = Path(folder).absolute()
        existing = next(each for each in (whole, *whole.parents) if each.is_dir())
        path = existing / _checked(name)
        with path.open("x", encoding="utf-8") as file:  # never over another, or through a link
            file.write("drivetrain doctor\n")
        self._left.add(path)
        return str(existing)

    def sees(self, folder: str, name: str) -> bool:
        """Whether it is there, for this host; a shared file system may take a second."""
        path = Path(folder) / _checked(name)
        for _ in range(20):
            if path.exists():
                return True
            time.sleep(0.1)
        return False

    def clear(self, folder: str, name: str) -> None:
        """Take it away again: only what this agent has put there."""
        path = Path(folder) / name
        if path not in self._left:
            raise ValueError(f"this agent did not leave {path}")
        path.unlink(missing_ok=True)


def answer(agent: Agent, request: Mapping[str, Any]) -> dict[str, Any]:
    """One request, one answer; what goes wrong is an answer, too."""
    name = request.get("call")
    if name not in CALLS:
        return {"error": f"this agent does not know {name!r}; is Drivetrain older there?"}
    method: Callable[..., Any] = getattr(agent, name)
    try:
        return {"answer": method(**request["with"])}
    except Exception as error:  # the client decides what it means
        return {"error": f"{type(error).__name__}: {error}"}


def _checked(name: str) -> str:
    if not TOKEN.fullmatch(name):
        raise ValueError(f"{name!r} is not a name that a doctor gives a file")
    return name


def main() -> None:
    """Until the input ends: the client is gone, or done."""
    agent = Agent()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(answer(agent, json.loads(line))) + "\n")
        sys.stdout.flush()
    agent.close_ports()


if __name__ == "__main__":
    main()

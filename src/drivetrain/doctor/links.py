"""The way between two hosts, tried for real: one listens, the other dials and measures."""

from __future__ import annotations

import errno
import socket
import struct
import threading
import time
from collections.abc import Sequence
from statistics import median

from drivetrain.doctor.facts import Dial

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

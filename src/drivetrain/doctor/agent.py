"""The doctor's hands on one host: `python -m drivetrain.doctor.agent`.

It is told what to do in lines of JSON, on its input or by files in a folder (`channels.py`), and
answers in kind. It stays out of torch's way: nothing here imports it.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from drivetrain.doctor import links
from drivetrain.doctor.host import host_facts
from drivetrain.doctor.network import resolve

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
        self._listener: links.Listener | None = None
        self._left: set[Path] = set()

    def facts(self, ports: Sequence[int], places: Sequence[str]) -> dict[str, Any]:
        """HostFacts."""
        return asdict(host_facts(ports, places))

    def clock(self) -> float:
        """This host's idea of now."""
        return time.time()

    def listen(self, ports: Sequence[int]) -> dict[str, int]:
        """Open ports to be dialled; those that are held are left out of the answer."""
        self.close_ports()
        self._listener = links.Listener(ports)
        return {str(asked): opened for asked, opened in self._listener.ports.items()}

    def close_ports(self) -> None:
        """Close them."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def resolve(self, name: str) -> list[str]:
        """The addresses of a name as this host sees it."""
        return list(resolve(name))

    def dial(self, purpose: str, address: str, port: int) -> dict[str, Any]:
        """Dial."""
        return asdict(links.dial(purpose, address, port))

    def measure(self, address: str, port: int) -> dict[str, float | None]:
        """Latency and rate to a listener."""
        return {
            "latency_s": links.latency(address, port),
            "bytes_per_s": links.bytes_per_second(address, port),
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

"""Who holds a port."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

from drivetrain.core.redaction import clean_text
from drivetrain.doctor.facts import PortUse

_LISTENING = "0A"


def port_use(port: int) -> PortUse:
    """Whether a server could open the port here, and who is in the way."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as trying:
        # as servers do: connections that are only fading out are not in the way
        trying.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trying.bind(("", port))
            trying.listen(1)
        except OSError:
            return _holder(port)
    return PortUse(port, is_free=True)


def _holder(port: int) -> PortUse:
    sockets = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    for folder in Path("/proc").glob("[0-9]*"):
        if sockets and _holds(folder, sockets):
            return PortUse(port, False, int(folder.name), *_described(folder))
    return PortUse(port, is_free=False)


def _listening_inodes(port: int) -> list[str]:
    inodes = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text(encoding="utf-8").splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.append(fields[9])
    return inodes


def _holds(folder: Path, sockets: set[str]) -> bool:
    try:
        return any(os.readlink(entry) in sockets for entry in (folder / "fd").iterdir())
    except OSError:  # another user's, or just gone
        return False


def _described(folder: Path) -> tuple[str, float | None, bool]:
    """Its command line, its age, and whether the process that started it is gone."""
    try:
        words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        fields = (folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        uptime_s = float(Path("/proc/uptime").read_text(encoding="utf-8").split()[0])
    except OSError:
        return "", None, False
    age_s = max(0.0, uptime_s - int(fields[19]) / os.sysconf("SC_CLK_TCK"))
    return clean_text(words.strip())[:120], age_s, fields[1] == "1"


def age_text(age_s: float | None) -> str:
    """Roughly; for evidence."""
    if age_s is None:
        return "unknown age"
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time.time() - age_s))
    return f"running since {started}"

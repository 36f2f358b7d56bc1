"""Ranks of `worker.py`, each a process of its own that waits at marked places."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def start_ranks(
    folder: Path, config: Mapping[str, Any], num_ranks: int, env: Mapping[str, str]
) -> list[subprocess.Popen[str]]:
    """All of them, on this host; `env`: beside what tells them who they are."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    argv = [sys.executable, "-m", "benchmarks.weights.worker", json.dumps(config), str(folder)]
    ranks = []
    for rank in range(num_ranks):
        size, number = str(num_ranks), str(rank)
        facts = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "RANK": number, "LOCAL_RANK": number}
        facts |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            argv, env={**os.environ, **facts, **env}, stdin=pipe, stdout=pipe, text=True
        )
        ranks.append(process)
    return ranks

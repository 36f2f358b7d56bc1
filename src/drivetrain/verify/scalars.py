"""The scalars that a run reported for its steps, from rank 0's event file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def step_scalars(run: Path) -> dict[int, dict[str, Any]]:
    """Scalars by step, for steps with a training loss; if a step was repeated, the later one."""
    found = {}
    for line in (run / "events" / "00000.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["kind"] == "scalars" and "train/loss" in event["values"]:
            found[int(event["step"])] = event["values"]
    return found

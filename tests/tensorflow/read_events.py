"""The training losses that TensorBoard reads in a run's directory, by step, as JSON.

A process of its own: TensorBoard loads TensorFlow, which sets environment variables.
"""

from __future__ import annotations

import json
import sys

from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer


def losses(folder: str) -> dict[int, float]:
    events = EventMultiplexer().AddRunsFromDirectory(folder).Reload()
    found: dict[int, float] = {}
    for name, tags in events.Runs().items():
        if "train/loss" in tags["scalars"]:
            found |= {each.step: each.value for each in events.Scalars(name, "train/loss")}
    return found


if __name__ == "__main__":
    print(json.dumps(losses(sys.argv[1])))

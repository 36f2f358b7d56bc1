"""`drivetrain rehearse`."""

from __future__ import annotations

import json
import re

from drivetrain.core.errors import ConfigError, Problem

_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def run(
    words: tuple[str, ...],
    world_size: int,
    ranks: str,
    device_memory: str | None,
    devices_per_node: int,
    *,
    as_json: bool,
) -> int:
    """Rehearse, and say what came of it; 1 when something would have gone wrong."""
    from drivetrain.cli.terminal import terminal

    memory = None if device_memory is None else memory_size(device_memory)

    from drivetrain.rehearse.client import Asked, rehearse
    from drivetrain.rehearse.show import as_dict, lines

    console = terminal(soft_wrap=True)
    with console.status("") as status:  # shown on a terminal only
        asked = Asked(words, world_size, ranks, memory, devices_per_node)
        rehearsal = rehearse(asked, status.update)
    if as_json:
        console.print(json.dumps(as_dict(rehearsal), indent=2), markup=False)
    else:
        for line in lines(rehearsal):
            console.print(line, markup=False)
    return 1 if any(not finding.is_warning for finding in rehearsal.findings) else 0


def memory_size(text: str) -> int:
    """80G, 80GiB or 512M, in bytes."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if found is None:
        problem = Problem("--device-memory", "not a size", "write 80G or 512M", text)
        raise ConfigError([problem])
    return int(float(found[1]) * _UNITS[found[2]])

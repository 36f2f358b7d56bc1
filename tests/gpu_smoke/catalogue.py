"""The checks, in the order they are run: what matters most comes first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from tests.gpu_smoke.budget import Times
from tests.gpu_smoke.checks import (
    environment,
    killing,
    overhead,
    parity,
    resuming,
    same_bits,
    waiting,
)
from tests.gpu_smoke.rows import Row


@dataclass(frozen=True)
class Check:
    name: str
    title: str
    times: Times
    rows: Callable[[], Iterator[Row]]
    min_devices: int = 1


CHECKS = (
    Check("environment", "Devices and versions", Times(5, 60), environment.rows),
    Check("parity-1", "One device against the CPU", Times(20, 120), parity.one_device),
    Check(
        "parity-2",
        "Layouts on 2 devices against one",
        Times(30, 240),
        partial(parity.layouts, 2),
        min_devices=2,
    ),
    Check(
        "parity-4",
        "Layouts on 4 devices against one",
        Times(30, 150),
        partial(parity.layouts, 4),
        min_devices=4,
    ),
    Check("resume", "A save and a resume", Times(20, 120), resuming.rows),
    Check("kill", "kill -9 of a rank under `drivetrain train`", Times(25, 120), killing.rows),
    Check("bits", "`reproducibility: bitwise`: one SHA-256", Times(25, 150), same_bits.rows),
    Check("waits", "Host synchronisations in a step", Times(25, 150), waiting.rows),
    Check(
        "overhead",
        "Overhead over the bare loop (measured, not judged)",
        Times(60, 240),
        overhead.rows,
    ),
    Check(
        "parity-all",
        "Layouts on all devices against one",
        Times(30, 120),
        parity.all_devices,
        min_devices=3,
    ),
    Check(
        "deepspeed",
        "DeepSpeed's layouts against one device",
        Times(40, 120),
        parity.deepspeed,
        min_devices=2,
    ),
)

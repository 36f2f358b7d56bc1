from __future__ import annotations

from typing import Any

from benchmarks.links.slow_link import TUNED, make_table


def outcome(arm: str, seed: int, seconds: float, *, is_reached: bool = True) -> dict[str, Any]:
    return {
        "arm": arm,
        "seed": seed,
        "seconds": seconds,
        "steps": 40,
        "is_reached": is_reached,
    }


def turn(arm: str, seed: int, median_step_s: float) -> dict[str, Any]:
    return {"arm": arm, "seed": seed, "median_step_s": median_step_s}


def test_each_arm_stands_against_tuned_ddp_on_its_link() -> None:
    runs = [outcome(TUNED, 1, 30.0), outcome(TUNED, 2, 32.0), outcome(TUNED, 3, 40.0)]
    runs += [outcome("local", 3, 4.0), outcome("slow", 1, 9.0)]
    runs += [outcome("slow", 2, 9.0, is_reached=False)]
    turns = [turn(TUNED, 0, 0.8), turn("auto", 0, 1.0), turn(TUNED, 1, 0.6), turn("auto", 1, 0.5)]
    links = {"100 Mbit/s": {"tuned": "bf16, 25 MB", "runs": runs, "turns": turns}}
    table = make_table({"machine": {"cores": 2}, "target": 1.3, "links": links})
    assert table.splitlines()[-4:] == [
        "| 100 Mbit/s | ddp, tuned (bf16, 25 MB) | 800 ms | 40 | 32.0 (30.0 to 40.0) "
        "| 1.00× (1.00 to 1.00) |",
        "| 100 Mbit/s | local | 100 ms | 40 | 4.0 (4.0 to 4.0) | 10.00× (10.00 to 10.00) |",
        "| 100 Mbit/s | slow | 225 ms | 40 | not reached | – |",
        "| 100 Mbit/s | auto | 750 ms | as ddp | – | 1.00× (0.80 to 1.20) |",
    ]

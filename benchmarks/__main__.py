"""`python -m benchmarks NAME`: one measurement; raw samples, table and plot in one folder."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from benchmarks.faults.recovery import run_recovery
from benchmarks.faults.scale import run_scale
from benchmarks.faults.supervision import run_supervision
from benchmarks.links.all_reduces import run_all_reduces
from benchmarks.links.collectives import run_collectives
from benchmarks.links.slow_link import run_slow_link
from benchmarks.parameter_server.bench import run_parameter_server
from benchmarks.plan.time import run_plan_time
from benchmarks.reading.bench import run_reading
from benchmarks.steps import campaign
from benchmarks.targets.ray import run_ray
from benchmarks.targets.start import run_start
from benchmarks.weights.life import run_life
from benchmarks.weights.save_plan import run_save_plan
from benchmarks.weights.start import run_first_weights
from drivetrain.testing.hosts import make_hosts


class Benchmark(NamedTuple):
    """What it measures, in how many rounds by default, and how."""

    about: str
    rounds: int
    run: Callable[[Path, int, int], str]
    """Output folder, rounds and ranks in, table out."""


BENCHMARKS = {
    "overhead": Benchmark(
        "a step under Drivetrain, bare torch, Accelerate and Lightning Fabric",
        120,
        campaign.run_overhead,
    ),
    "bitwise": Benchmark(
        "`reproducibility: bitwise` next to the standard mode", 60, campaign.run_bitwise
    ),
    "axes": Benchmark(
        "a step under fsdp, tp and pp, next to the same on bare torch", 60, campaign.run_axes
    ),
    "sentinel": Benchmark("comparing the replicas of the model", 60, campaign.run_sentinel),
    "replay": Benchmark("computing a step twice, and comparing", 60, campaign.run_replay),
    "parameter-server": Benchmark(
        "parameter servers next to ddp and local SGD: staleness, slow ranks (rounds: seeds)",
        10,
        lambda folder, rounds, _: run_parameter_server(folder, rounds),
    ),
    "stream": Benchmark("comparing what ranks read of a stream", 300, campaign.run_stream),
    "recording": Benchmark("the recorder and all sinks", 40, campaign.run_recording),
    "save": Benchmark(
        "an asynchronous checkpoint, next to none and to bare DCP", 30, campaign.run_save
    ),
    "recovery": Benchmark(
        "kill -9 trials: torchrun, its work-around, warm spares, live replicas (rounds: kills)",
        8,
        lambda folder, rounds, _: run_recovery(folder, rounds),
    ),
    "supervision": Benchmark(
        "being supervised when nothing goes wrong, next to torchrun",
        12,
        lambda folder, rounds, _: run_supervision(folder, rounds),
    ),
    "start": Benchmark(
        "from the command to the script's first line, next to torchrun", 20, run_start
    ),
    "scale": Benchmark(
        "the control plane with 10,000 simulated ranks", 1, lambda folder, _, __: run_scale(folder)
    ),
    "reading": Benchmark(
        "reading runs of up to 4,096 ranks × 10,000 steps",
        1,
        lambda folder, _, __: run_reading(folder),
    ),
    "ray": Benchmark(
        "start-up and step time on Ray, next to bare Ray Train",
        8,
        lambda folder, rounds, _: run_ray(folder, rounds),
    ),
    "plan-time": Benchmark(
        "predicted step times next to measured ones, on three link speeds (needs root)",
        1,
        lambda folder, _, __: run_plan_time(folder, make_hosts),
    ),
    "first-weights": Benchmark(
        "peak memory and bytes read of a sharded start, 607 million parameters on four ranks",
        1,
        lambda folder, _, __: run_first_weights(folder),
    ),
    "large-model": Benchmark(
        "memory of each rank from start over save, kill and resume to the final files, four ranks",
        1,
        lambda folder, _, __: run_life(folder),
    ),
    "save-plan": Benchmark(
        "a save's plan and index at 4,096 ranks × 1,000 tensors, next to torch's planner",
        1,
        lambda folder, _, __: run_save_plan(folder),
    ),
    "collectives": Benchmark(
        "`bench collectives` next to plain loops, on 2 to 8 ranks and on shaped links (needs root)",
        1000,
        lambda folder, rounds, _: run_collectives(folder, rounds, make_hosts),
    ),
    "all-reduces": Benchmark(
        "the course's ring, recursive halving, tree and naive all-reduce by size (needs root)",
        20,
        lambda folder, rounds, _: run_all_reduces(folder, rounds, make_hosts),
    ),
    "slow-link": Benchmark(
        "time to the same loss over slow links: tuned ddp, compressors, local SGD, DiLoCo",
        1,
        lambda folder, _, __: run_slow_link(folder, make_hosts),
    ),
}


def main() -> None:
    names = "\n".join(f"  {name:12} {each.about}" for name, each in BENCHMARKS.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=f"Measurements, always next to the bare engine.\n\n{names}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=BENCHMARKS, metavar="NAME")
    parser.add_argument("--output", type=Path, help="folder for results; default: bench-NAME")
    parser.add_argument("--rounds", type=int, help="rounds; each holds a block of every arm")
    parser.add_argument("--ranks", type=int, default=2, help="processes (default: 2)")
    given = parser.parse_args()
    benchmark = BENCHMARKS[given.name]
    folder = given.output or Path(f"bench-{given.name}")
    table = benchmark.run(folder, given.rounds or benchmark.rounds, given.ranks)
    sys.stdout.write(f"{table}\nraw samples, table and plot: {folder}/\n")


if __name__ == "__main__":
    main()

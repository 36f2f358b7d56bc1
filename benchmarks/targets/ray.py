"""`benchmarks ray`: start-up and step time on Ray, next to Ray Train bare and our launcher.

One Ray cluster of this machine serves all rounds: to start it is nobody's start-up. Start-up is
from the command (a driver, or `drivetrain train`) to the end of the first step.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.requirements import require
from drivetrain.core.statistics import paired_ratio

_TIMES = "DRIVETRAIN_BENCH_TIMES"
_BARE, _ON_RAY, _LOCAL = "Ray Train bare", "drivetrain on Ray", "drivetrain, local launcher"
ARMS = (_BARE, _ON_RAY, _LOCAL, f"{_BARE} again")
_START_S, _RUN_S = 600.0, 900.0
_WARM_STEPS = 50
"""Left out of the step time."""
Samples = dict[str, dict[str, list[float]]]


def run_ray(output: Path, num_rounds: int) -> str:
    """Rounds of all arms in turn; the table."""
    require("ray", extra="ray")
    output.mkdir(parents=True, exist_ok=True)
    samples: Samples = {arm: {"start_up_s": [], "step_s": []} for arm in ARMS}
    loads = []
    with (
        tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder,
        _cluster(Path(folder)) as environment,
    ):
        for number in range(num_rounds):
            for arm in ARMS[number % len(ARMS) :] + ARMS[: number % len(ARMS)]:
                loads.append(os.getloadavg()[0])
                start_up_s, step_s = _trial(arm, environment)
                samples[arm]["start_up_s"].append(start_up_s)
                samples[arm]["step_s"].append(step_s)
            document = {"samples": samples, "load": loads}
            (output / "samples.json").write_text(json.dumps(document, indent=1) + "\n")
    table = make_table(samples, loads)
    (output / "table.md").write_text(table)
    return table


def make_table(samples: Samples, loads: list[float]) -> str:
    """Medians over rounds, paired with the bare engine's of the same round."""
    lines = [
        f"2 ranks, CPU, gloo, one machine of {os.cpu_count()} cores, load {min(loads):.0f} to "
        f"{max(loads):.0f} when the arms began; {len(samples[_BARE]['step_s'])} rounds of all arms "
        f"in turn. Ratios to `{_BARE}` of the same round, with the bootstrap's 95% interval; "
        f"`{_BARE} again` is the A/A arm. Not run on a GPU.",
        "",
        "| arm | start-up | ratio | median step | ratio |",
        "| --- | ---: | --- | ---: | --- |",
    ]
    for arm, values in samples.items():
        cells = [arm]
        for name, unit, scale in (("start_up_s", "s", 1.0), ("step_s", "ms", 1e3)):
            found = paired_ratio(values[name], samples[_BARE][name])
            ratio = f"{found.value:.3f} ({found.low:.3f} to {found.high:.3f})"
            cells += [f"{median(values[name]) * scale:.2f} {unit}", "1" if arm == _BARE else ratio]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _trial(arm: str, environment: dict[str, str]) -> tuple[float, float]:
    """Seconds to the end of the first step, and the median of the later ones."""
    with tempfile.TemporaryDirectory(prefix="bench-ray-") as folder:
        times = Path(folder) / "times.json"
        began_s = time.time()
        done = subprocess.run(
            _command(arm, folder),
            env={**environment, _TIMES: str(times)},
            capture_output=True,
            text=True,
            check=False,
            timeout=_RUN_S,
        )
        if done.returncode:
            raise DrivetrainError(f"{arm}: exit code {done.returncode}\n{done.stderr[-3000:]}")
        ended: list[float] = json.loads(times.read_text())
    steps = [after - before for before, after in pairwise(ended)]
    return ended[0] - began_s, median(steps[_WARM_STEPS:])


def _command(arm: str, folder: str) -> list[str]:
    if arm == _LOCAL:
        train = [sys.executable, "-m", "drivetrain", "train", "--nproc-per-node=2"]
        return [*train, f"--run-dir={folder}/run", "-m", "benchmarks.targets.ray_worker"]
    which = "script" if arm == _ON_RAY else "bare"
    return [sys.executable, "-m", "benchmarks.targets.ray_driver", which, folder]


@contextmanager
def _cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Ray on this machine, and what a driver must know to find it."""
    log = folder / "ray.log"
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
    command += ["--port=0", "--num-cpus=2", "--include-dashboard=false"]
    command += [f"--temp-dir={folder}", "--node-ip-address=127.0.0.1"]
    # only this machine reaches it; a token in the user's home would make the head ask for it
    settings = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **settings}
    with log.open("w") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
    try:
        deadline_s = time.monotonic() + _START_S
        while "Ray runtime started" not in log.read_text():
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise DrivetrainError(f"Ray did not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.2)
        address = (folder / "ray_current_cluster").read_text().strip()
        yield {**environment, "RAY_ADDRESS": address}
    finally:
        process.terminate()
        process.wait(60)

"""`python -m benchmarks.tune.overhead FOLDER`: what a study costs beside its trials.

Trials are computed instead of trained, and are over as soon as they are submitted: what is left is
the driver with its journal on disk, the sampler, and Optuna's journal beside it. The arms ask for
the same space one trial after the other, each in a process of its own, in turns:

    drivetrain        `Driver` itself; every line of its journal is on disk (fsync) before the next
    optuna, memory    study.ask(), suggest, study.tell(), in memory
    optuna, journal   the same with JournalStorage(JournalFileBackend), as a study that survives
    ray tune          tune.Tuner.fit() of a function, one trial at a time, with OptunaSearch; Ray is
                      started before the clock is (left out where it is not installed)

and after that one study of 10,000 trials, and `tune ls` and `tune show` on it.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.reading.bench import timed
from benchmarks.tune import local_ray
from drivetrain.core.requirements import require
from drivetrain.launch.job import Job
from drivetrain.launch.target import State as JobState
from drivetrain.launch.target import Status
from drivetrain.launch.targets.local import Local
from drivetrain.tune.decide import Work
from drivetrain.tune.driver import Driver
from drivetrain.tune.journal import Asked, Ended
from drivetrain.tune.settings import Settings, open_study
from drivetrain.tune.space import Choice, Float, Int, Space
from drivetrain.tune.trial_run import Runner

_RAY = "ray tune"
ARMS = ("drivetrain", "optuna, memory", "optuna, journal", _RAY)
SAMPLERS = ("random", "tpe")
NUM_TRIALS = 1_000
LARGE = 10_000
ROUNDS = 5
SPACE = Space(
    {
        "optimization.learning_rate": Float(1e-4, 1e-1, log=True),
        "optimization.weight_decay": Float(0.0, 0.1),
        "optimization.warmup_steps": Int(0, 100),
        "optimization.optimizer": Choice(("adamw", "sgd")),
    }
)


def loss_of(values: Any) -> float:
    """The near-empty objective."""
    rate, decay = values["optimization.learning_rate"], values["optimization.weight_decay"]
    warmup = values["optimization.warmup_steps"]
    return float(abs(rate - 0.01) + decay + warmup / 1e4)


@dataclasses.dataclass(frozen=True)
class Computed(Runner):
    """A trial is over as soon as it is submitted."""

    started: dict[int, Asked] = dataclasses.field(default_factory=dict)

    def status(self, asked: Asked, rung: int) -> Status | None:  # noqa: ARG002
        return Status(JobState.FINISHED) if asked.trial in self.started else None

    def start(self, asked: Asked, rung: int, running: Iterable[int]) -> bool:  # noqa: ARG002
        self.started[asked.trial] = asked
        return True

    def result(self, work: Work, status: Status, num_resumed: int) -> Ended | None:  # noqa: ARG002
        asked = self.started.pop(work.trial)
        return Ended(work.trial, work.rung, "done", 10, loss_of(asked.values))


def drive(folder: Path, sampler: str, num_trials: int, rungs: tuple[int, ...] = ()) -> None:
    """A study to its end, one trial at a time."""
    settings = Settings("train.py", (), num_trials, sampler=sampler, rungs=rungs)  # type: ignore[arg-type]
    study = open_study(folder, settings, SPACE)
    runner = Computed(study, Local(), Job("study", "train.py", (), (), "", ""))
    if Driver(study, runner, 1).run() is None:
        raise RuntimeError("no trial has a value")


def optuna_alone(folder: Path, sampler: str, num_trials: int, *, on_disk: bool) -> None:
    """As its documentation has ask and tell."""
    import optuna
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    samplers: dict[str, Any] = {
        "random": optuna.samplers.RandomSampler,
        "tpe": optuna.samplers.TPESampler,
    }
    backend = JournalFileBackend(str(folder / "optuna.journal"))
    storage = optuna.storages.JournalStorage(backend) if on_disk else None
    study = optuna.create_study(storage=storage, sampler=samplers[sampler](seed=0))
    for _ in range(num_trials):
        trial = study.ask()
        values = {
            "optimization.learning_rate": trial.suggest_float("learning_rate", 1e-4, 0.1, log=True),
            "optimization.weight_decay": trial.suggest_float("weight_decay", 0.0, 0.1),
            "optimization.warmup_steps": trial.suggest_int("warmup_steps", 0, 100),
            "optimization.optimizer": trial.suggest_categorical("optimizer", ("adamw", "sgd")),
        }
        study.tell(trial, loss_of(values))


def _ray_trial(config: dict[str, Any]) -> dict[str, float]:
    return {"loss": loss_of(config)}


def ray_alone(folder: Path, sampler: str, num_trials: int) -> None:
    """Ray Tune's own loop; a worker that is done takes the next trial."""
    import optuna
    from ray import tune
    from ray.tune.search.optuna import OptunaSearch

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    samplers = {"random": optuna.samplers.RandomSampler, "tpe": optuna.samplers.TPESampler}
    space = {
        "optimization.learning_rate": tune.loguniform(1e-4, 1e-1),
        "optimization.weight_decay": tune.uniform(0.0, 0.1),
        "optimization.warmup_steps": tune.randint(0, 101),
        "optimization.optimizer": tune.choice(["adamw", "sgd"]),
    }
    local_ray.fit(
        _ray_trial,
        space,
        folder,
        search_alg=OptunaSearch(sampler=samplers[sampler](seed=0)),
        num_samples=num_trials,
        max_concurrent_trials=1,
    )


def one(arm: str, sampler: str, num_trials: int) -> dict[str, Any]:
    """One sample, in this process, and in what Ray has started beside it."""
    with ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory(prefix="tune-overhead-"))
        folder = Path(name) / "study"
        folder.mkdir()
        import optuna  # noqa: F401 - not part of what is measured

        if arm == _RAY:
            stack.enter_context(local_ray.started(1))
        began_s, began_cpu_s = time.perf_counter(), _cpu_s()
        if arm == "drivetrain":
            drive(folder, sampler, num_trials)
        elif arm == _RAY:
            ray_alone(folder, sampler, num_trials)
        else:
            optuna_alone(folder, sampler, num_trials, on_disk=arm == "optuna, journal")
        return {
            "arm": arm,
            "sampler": sampler,
            "trials": num_trials,
            "seconds": time.perf_counter() - began_s,
            "cpu_s": _cpu_s() - began_cpu_s,
            "memory_bytes": _memory_bytes(),
            "load": os.getloadavg()[0],
        }


def _cpu_s() -> float:
    """Of this process and those below it that live."""
    psutil = require("psutil", extra="system")
    own = psutil.Process()
    found = 0.0
    for each in (own, *own.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            found += sum(each.cpu_times()[:2])
    return found


def large() -> dict[str, Any]:
    """A study of many trials, with a rung, and the verbs that read it."""
    with tempfile.TemporaryDirectory(prefix="tune-overhead-") as name:
        folder = Path(name) / "study"
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        drive(folder, "random", LARGE, rungs=(5,))
        found: dict[str, Any] = {
            "trials": LARGE,
            "seconds": time.perf_counter() - began_s,
            "cpu_s": time.process_time() - began_cpu_s,
            "memory_bytes": _memory_bytes(),
            "journal_bytes": (folder / "journal.jsonl").stat().st_size,
        }
        for verb in ("ls", "show"):
            found[verb] = [timed(["tune", verb, str(folder)]) for _ in range(ROUNDS)]
        return found


def _memory_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _in_a_process(*words: str) -> Any:
    command = [sys.executable, "-m", "benchmarks.tune.overhead", "--one", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def measure(folder: Path, rounds: int) -> str:
    """All arms in turns; raw samples and the table."""
    folder.mkdir(parents=True, exist_ok=True)
    samples = []
    has_ray = importlib.util.find_spec("ray") is not None
    arms = [arm for arm in ARMS if arm != _RAY or has_ray]
    for number in range(rounds):
        turned = arms[number % len(arms) :] + arms[: number % len(arms)]
        for sampler in SAMPLERS:
            samples += [_in_a_process(arm, sampler, str(NUM_TRIALS)) for arm in turned]
    found = {
        "machine": f"{os.cpu_count()} cores, Python {platform.python_version()}",
        "samples": samples,
        "large": _in_a_process("large"),
    }
    (folder / "overhead.json").write_text(json.dumps(found, indent=1) + "\n")
    text = table(found)
    (folder / "overhead.md").write_text(text)
    return text


def table(found: dict[str, Any]) -> str:
    """For people."""
    loads = [each["load"] for each in found["samples"]]
    arms = [arm for arm in ARMS if any(each["arm"] == arm for each in found["samples"])]
    rounds = len(found["samples"]) // len(arms) // len(SAMPLERS)
    said = "The machine was busy with other things: only the processor's seconds can be compared."
    busy = ["", said] if max(loads) > (os.cpu_count() or 1) + 1 else []
    lines = [
        "# A study's own cost",
        "",
        f"`benchmarks/tune/overhead.py` ({found['machine']}). Trials that are computed, not"
        f" trained; each arm in a process of its own, rounds: {rounds}, of which the median. Load"
        f" of the machine meanwhile: {min(loads):.1f} to {max(loads):.1f}.",
        *busy,
        "",
        "| sampler | arm | trials | seconds | trials/s | slowest round | processor | memory |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for sampler in SAMPLERS:
        for arm in arms:
            of_arm = [s for s in found["samples"] if (s["arm"], s["sampler"]) == (arm, sampler)]
            lines.append(_row(sampler, arm, of_arm))
    whole = found["large"]
    lines += [
        "",
        f"One study of {whole['trials']:,} trials with a rung (`random`):"
        f" {whole['seconds']:.0f} s, of which {whole['cpu_s']:.0f} s processor;"
        f" {whole['memory_bytes'] / 1e6:,.0f} MB at most; a journal of"
        f" {whole['journal_bytes'] / 1e6:.1f} MB.",
        "",
        "| verb on it | seconds | slowest | processor | memory |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for verb in ("ls", "show"):
        took = [each["seconds"] for each in whole[verb]]
        cpu_s = median(each["cpu_s"] for each in whole[verb])
        memory = max(each["memory_bytes"] for each in whole[verb])
        figures = f"{median(took):.2f} | {max(took):.2f} | {cpu_s:.2f} s | {memory / 1e6:,.0f} MB"
        lines.append(f"| `tune {verb}` | {figures} |")
    return "\n".join([*lines, ""])


def _row(sampler: str, arm: str, samples: Sequence[dict[str, Any]]) -> str:
    took = [each["seconds"] for each in samples]
    cpu_s = median(each["cpu_s"] for each in samples)
    trials, memory = samples[0]["trials"], max(each["memory_bytes"] for each in samples)
    figures = f"{median(took):.1f} | {trials / median(took):,.0f} | {max(took):.1f}"
    return (
        f"| {sampler} | {arm} | {trials:,} | {figures} | {cpu_s:.1f} s | {memory / 1e6:,.0f} MB |"
    )


if __name__ == "__main__":
    if sys.argv[1] == "--one":
        made = (
            large() if sys.argv[2] == "large" else one(sys.argv[2], sys.argv[3], int(sys.argv[4]))
        )
        print(json.dumps(made))
    else:
        print(measure(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else ROUNDS))

"""`python -m benchmarks.tune_winners FOLDER`: does the winner change with the number of workers?

The same space, the same seeds and the same objective, whose value is a function of the parameters;
each trial takes a few milliseconds, which are a function of its parameters too. Every arm uses
Optuna's TPE. Counted is how many seeds end with another best trial than on one worker.

    drivetrain, deterministic   the driver itself, --generation 8
    drivetrain, eager           the same, --schedule eager
    optuna                      study.optimize(n_jobs=workers), its threads
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

WORKERS = (1, 2, 4, 8)
NUM_SEEDS = 10
NUM_TRIALS = 24
_KEYS = ("optimization.learning_rate", "optimization.weight_decay", "optimization.momentum")
Winner = tuple[float, ...]


def loss_of(values: Mapping[str, Any]) -> float:
    """A bowl, off the middle, in all three."""
    rate, decay, momentum = (float(values[key]) for key in _KEYS)
    return (rate - 0.03) ** 2 * 100 + (decay - 0.7) ** 2 + (momentum - 0.3) ** 2


def seconds_of(values: Mapping[str, Any]) -> float:
    """2 to 42 ms; neighbours in the space have nothing to do with each other."""
    return 0.002 + 0.04 * (float(values[_KEYS[0]]) * 1e4 % 1.0)


def drivetrain(seed: int, num_workers: int, schedule: str) -> Winner:
    """The driver, with trials that end when their time is over."""
    from drivetrain.launch.job import Job
    from drivetrain.launch.target import State as JobState
    from drivetrain.launch.target import Status
    from drivetrain.launch.targets.local import Local
    from drivetrain.tune.decide import Work
    from drivetrain.tune.driver import Driver
    from drivetrain.tune.journal import Asked, Ended, read_journal
    from drivetrain.tune.settings import Settings, open_study
    from drivetrain.tune.space import Float, Space
    from drivetrain.tune.trial_run import Runner

    @dataclasses.dataclass(frozen=True)
    class Timed(Runner):
        begun: dict[int, tuple[Asked, float]] = dataclasses.field(default_factory=dict)

        def status(self, asked: Asked, rung: int) -> Status | None:  # noqa: ARG002
            if asked.trial not in self.begun:
                return None
            is_over = time.monotonic() >= self.begun[asked.trial][1]
            return Status(JobState.FINISHED if is_over else JobState.RUNNING)

        def start(self, asked: Asked, rung: int, running: Iterable[int]) -> bool:  # noqa: ARG002
            self.begun[asked.trial] = (asked, time.monotonic() + seconds_of(asked.values))
            return True

        def pause_s(self, num_running: int) -> float:  # noqa: ARG002
            return 0.0005

        def result(self, work: Work, status: Status, num_resumed: int) -> Ended | None:  # noqa: ARG002
            values = self.begun[work.trial][0].values
            return Ended(work.trial, work.rung, "done", 1, loss_of(values))

    space = Space({_KEYS[0]: Float(1e-3, 0.1), _KEYS[1]: Float(0, 1), _KEYS[2]: Float(0, 0.9)})
    settings = Settings("train.py", (), NUM_TRIALS, seed=seed, schedule=schedule)  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory(prefix="tune-winners-") as name:
        study = open_study(Path(name) / "study", settings, space)
        runner = Timed(study, Local(), Job("study", "train.py", (), (), "", ""))
        best = Driver(study, runner, num_workers).run()
        if best is None:
            raise RuntimeError("no trial has a value")
        values = read_journal(study.path).asked[best.trial].values
    return tuple(float(values[key]) for key in _KEYS)  # type: ignore[arg-type]


def optuna_alone(seed: int, num_workers: int) -> Winner:
    """As its documentation has it for several workers in one process."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)

    def objective(trial: Any) -> float:
        values = {
            _KEYS[0]: trial.suggest_float(_KEYS[0], 1e-3, 0.1),
            _KEYS[1]: trial.suggest_float(_KEYS[1], 0, 1),
            _KEYS[2]: trial.suggest_float(_KEYS[2], 0, 0.9),
        }
        time.sleep(seconds_of(values))
        return loss_of(values)

    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
    study.optimize(objective, n_trials=NUM_TRIALS, n_jobs=num_workers)
    return tuple(study.best_params[key] for key in _KEYS)


ARMS: Mapping[str, Callable[[int, int], Winner]] = {
    "drivetrain, deterministic": lambda seed, num: drivetrain(seed, num, "deterministic"),
    "drivetrain, eager": lambda seed, num: drivetrain(seed, num, "eager"),
    "optuna": optuna_alone,
}


def measure(arms: Iterable[str], workers: Iterable[int], num_seeds: int) -> list[dict[str, Any]]:
    """Every winner; on one worker twice, so that it is seen whether that is the same at all."""
    return [
        {"arm": arm, "seed": seed, "workers": num, "round": turn, "winner": ARMS[arm](seed, num)}
        for arm in arms
        for seed in range(num_seeds)
        for num in workers
        for turn in range(2 if num == 1 else 1)
    ]


def changed(found: list[dict[str, Any]], arm: str, num_workers: int) -> tuple[int, int]:
    """Of so many seeds, how many have another winner than the first round on one worker."""
    of_arm = [each for each in found if each["arm"] == arm]
    first = {e["seed"]: tuple(e["winner"]) for e in of_arm if (e["workers"], e["round"]) == (1, 0)}
    turn = 1 if num_workers == 1 else 0
    others = [e for e in of_arm if (e["workers"], e["round"]) == (num_workers, turn)]
    return sum(tuple(e["winner"]) != first[e["seed"]] for e in others), len(others)


def table(found: list[dict[str, Any]]) -> str:
    """For people."""
    workers = sorted({each["workers"] for each in found})
    heads = " | ".join("1, once more" if num == 1 else f"{num} workers" for num in workers)
    lines = [
        "# How often the winner changes with the number of workers",
        "",
        f"`benchmarks/tune_winners.py`: TPE, {NUM_TRIALS} trials, a loss and a duration that are"
        " functions of the parameters. Seeds that end with another winner than on one worker.",
        "",
        f"| | {heads} |",
        "| --- |" + " ---: |" * len(workers),
    ]
    for arm in dict.fromkeys(each["arm"] for each in found):
        cells = ["{} of {}".format(*changed(found, arm, num)) for num in workers]
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def main(folder: Path) -> None:
    """Write both files, and print the table."""
    folder.mkdir(parents=True, exist_ok=True)
    found = measure(ARMS, WORKERS, NUM_SEEDS)
    (folder / "winners.json").write_text(json.dumps(found, indent=1) + "\n")
    (folder / "winners.md").write_text(table(found))
    print(table(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

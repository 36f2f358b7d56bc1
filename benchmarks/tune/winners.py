"""`python -m benchmarks.tune.winners FOLDER [ARM …]`: does the winner depend on the workers?

The same space, the same seeds and the same objective, whose value is a function of the parameters;
each trial takes a few milliseconds, which are a function of its parameters too. Every arm uses
Optuna's TPE. Counted is how many seeds end with another best trial than on one worker.

    drivetrain, deterministic   the driver itself, --generation 8
    drivetrain, eager           the same, --schedule eager
    optuna                      study.optimize(n_jobs=workers), its threads

and the same with trials that are judged after 1/9 and 1/3 of their length, where a good one may
still look bad:

    drivetrain, halving, …      --rungs 1,3
    optuna, halving             its SuccessiveHalvingPruner
    ray tune, ASHA              Ray Tune's own loop: its AsyncHyperBandScheduler and OptunaSearch,
                                max_concurrent_trials=workers (left out where Ray is not installed)
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.tune import local_ray

WORKERS = (1, 2, 4, 8)
NUM_SEEDS = 10
_MOST_OF_RAY = {"seed": 4, "workers": 4}
"""Seeds, and workers at a time: each worker of each study is a new process, of seconds."""
NUM_TRIALS = 24
STEPS = (1, 3, 9)
"""Where a trial that may be stopped is judged; the last is its end."""
_KEYS = ("optimization.learning_rate", "optimization.weight_decay", "optimization.momentum")
_RANGES = dict(zip(_KEYS, ((1e-3, 0.1), (0.0, 1.0), (0.0, 0.9)), strict=True))
_RAY = "ray tune, ASHA"
Winner = tuple[float, ...]


def loss_of(values: Mapping[str, Any], step: int = STEPS[-1]) -> float:
    """A bowl, off the middle, in all three; early on, something that has nothing to do with it."""
    rate, decay, momentum = (float(values[key]) for key in _KEYS)
    bowl = (rate - 0.03) ** 2 * 100 + (decay - 0.7) ** 2 + (momentum - 0.3) ** 2
    misleading = 0.3 * (decay * 1e4 % 1.0)
    return bowl + misleading * (STEPS[-1] / step - 1) / (STEPS[-1] - 1)


def seconds_of(values: Mapping[str, Any]) -> float:
    """2 to 42 ms; neighbours in the space have nothing to do with each other."""
    return 0.002 + 0.04 * (float(values[_KEYS[0]]) * 1e4 % 1.0)


def seconds_to(values: Mapping[str, Any], step: int) -> float:
    """From the step before at which a trial may be stopped."""
    before = dict(pairwise((*reversed(STEPS), 0)))[step]
    return seconds_of(values) * (step - before) / STEPS[-1]


def drivetrain(seed: int, num_workers: int, schedule: str, *, halves: bool = False) -> Winner:
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

    steps = STEPS if halves else STEPS[-1:]

    @dataclasses.dataclass(frozen=True)
    class Timed(Runner):
        begun: dict[Work, tuple[Asked, float]] = dataclasses.field(default_factory=dict)

        def status(self, asked: Asked, rung: int) -> Status | None:
            work = Work(asked.trial, rung)
            if work not in self.begun:
                return None
            is_over = time.monotonic() >= self.begun[work][1]
            return Status(JobState.FINISHED if is_over else JobState.RUNNING)

        def start(self, asked: Asked, rung: int, running: Iterable[int]) -> bool:  # noqa: ARG002
            values = asked.values
            took_s = seconds_to(values, steps[rung]) if halves else seconds_of(values)
            self.begun[Work(asked.trial, rung)] = (asked, time.monotonic() + took_s)
            return True

        def pause_s(self, num_running: int) -> float:  # noqa: ARG002
            return 0.0005

        def result(self, work: Work, status: Status, num_resumed: int) -> Ended | None:  # noqa: ARG002
            step, asked = steps[work.rung], self.begun[work][0]
            return Ended(work.trial, work.rung, "done", step, loss_of(asked.values, step))

    space = Space({key: Float(*ends) for key, ends in _RANGES.items()})
    settings = Settings(
        "train.py",
        (),
        NUM_TRIALS,
        seed=seed,
        schedule=schedule,  # type: ignore[arg-type]
        rungs=steps[:-1],
    )
    with tempfile.TemporaryDirectory(prefix="tune-winners-") as name:
        study = open_study(Path(name) / "study", settings, space)
        runner = Timed(study, Local(), Job("study", "train.py", (), (), "", ""))
        best = Driver(study, runner, num_workers).run()
        if best is None:
            raise RuntimeError("no trial has a value")
        values = read_journal(study.path).asked[best.trial].values
    return tuple(float(values[key]) for key in _KEYS)  # type: ignore[arg-type]


def optuna_alone(seed: int, num_workers: int, *, halves: bool = False) -> Winner:
    """As its documentation has it for several workers in one process."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)

    def objective(trial: Any) -> float:
        values = {key: trial.suggest_float(key, *ends) for key, ends in _RANGES.items()}
        if not halves:
            time.sleep(seconds_of(values))
            return loss_of(values)
        for step in STEPS:
            time.sleep(seconds_to(values, step))
            trial.report(loss_of(values, step), step)
            if step < STEPS[-1] and trial.should_prune():
                raise optuna.TrialPruned
        return loss_of(values)

    pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=3)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed), pruner=pruner)
    study.optimize(objective, n_trials=NUM_TRIALS, n_jobs=num_workers)
    return tuple(study.best_params[key] for key in _KEYS)


def _ray_trial(config: dict[str, Any]) -> None:
    from ray import tune

    for step in STEPS:
        time.sleep(seconds_to(config, step))
        tune.report({"loss": loss_of(config, step), "step": step})


def ray_tune(seed: int, num_workers: int) -> Winner:
    """Its loop, its scheduler and its searcher; Ray runs already."""
    import optuna
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler
    from ray.tune.search.optuna import OptunaSearch

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    found = local_ray.fit(
        _ray_trial,
        {key: tune.uniform(*ends) for key, ends in _RANGES.items()},
        Path(tempfile.gettempdir()),
        search_alg=OptunaSearch(sampler=optuna.samplers.TPESampler(seed=seed)),
        scheduler=ASHAScheduler("step", max_t=STEPS[-1], grace_period=1, reduction_factor=3),
        num_samples=NUM_TRIALS,
        max_concurrent_trials=num_workers,
    )
    return tuple(float(found.get_best_result().config[key]) for key in _KEYS)


ARMS: Mapping[str, Callable[[int, int], Winner]] = {
    "drivetrain, deterministic": lambda seed, num: drivetrain(seed, num, "deterministic"),
    "drivetrain, eager": lambda seed, num: drivetrain(seed, num, "eager"),
    "optuna": optuna_alone,
    "drivetrain, halving, deterministic": lambda seed, num: drivetrain(
        seed, num, "deterministic", halves=True
    ),
    "drivetrain, halving, eager": lambda seed, num: drivetrain(seed, num, "eager", halves=True),
    "optuna, halving": lambda seed, num: optuna_alone(seed, num, halves=True),
    _RAY: ray_tune,
}


def measure(arms: Iterable[str], workers: Iterable[int], num_seeds: int) -> list[dict[str, Any]]:
    """Every winner; on one worker twice, so that it is seen whether that is the same at all."""
    given, nums = tuple(arms), tuple(workers)
    with ExitStack() as stack:
        if _RAY in given:
            stack.enter_context(local_ray.started(_MOST_OF_RAY["workers"]))
        return [
            {
                "arm": arm,
                "seed": seed,
                "workers": num,
                "round": turn,
                "winner": ARMS[arm](seed, num),
            }
            for seed in range(num_seeds)
            for num in nums
            for turn in range(2 if num == 1 else 1)
            for arm in given
            if arm != _RAY or (seed < _MOST_OF_RAY["seed"] and num <= _MOST_OF_RAY["workers"])
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
        f"`benchmarks/tune/winners.py`: TPE, {NUM_TRIALS} trials, a loss and a duration that are"
        " functions of the parameters. Seeds that end with another winner than on one worker.",
        "",
        f"| | {heads} |",
        "| --- |" + " ---: |" * len(workers),
    ]
    for arm in dict.fromkeys(each["arm"] for each in found):
        counts = [changed(found, arm, num) for num in workers]
        cells = ["{} of {}".format(*each) if each[1] else "not run" for each in counts]
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def main(folder: Path, only: Sequence[str]) -> None:
    """Write both files, and print the table; what was found of other arms before is kept."""
    folder.mkdir(parents=True, exist_ok=True)
    has_ray = importlib.util.find_spec("ray") is not None
    arms = [arm for arm in only or ARMS if arm != _RAY or has_ray]
    file = folder / "winners.json"
    before = json.loads(file.read_text()) if only and file.exists() else []
    found = [each for each in before if each["arm"] not in arms]
    found += measure(arms, WORKERS, NUM_SEEDS)
    file.write_text(json.dumps(found, indent=1) + "\n")
    (folder / "winners.md").write_text(table(found))
    print(table(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

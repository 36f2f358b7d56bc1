"""`python -m benchmarks.tune.quality FOLDER [ARM …] [--seeds N]`: what each search finds with as
many training steps; studies that FOLDER has are not repeated.

Every arm trains the same small network on scikit-learn's digits by the same function, evaluates it
every 27 steps, and may take `BUDGET` steps in all; a trial has 243 at most. Only the search
differs. What counts is the trial that the tool itself names as its best: its validation loss at its
last evaluation, and its loss on images that no arm has seen.

    drivetrain   the study's own decisions, samplers and budget (`decide`, `population`, `sampling`,
                 `budget`), with trials trained in this process instead of launched
    optuna       study.ask and tell with its pruners, TPE
    ray tune     Ray Tune's own loop, one trial at a time so that it always knows all results;
                 members of its PBT take turns on two workers (left out where Ray is not installed)

and beside it what early stopping saves: the same drawn trials, all to their end and by halving.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import os
import platform
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.tune import local_ray
from benchmarks.tune.digits import EVERY, LAST, RANGES, SPACE, Point, Training, ray_trial
from drivetrain.core.statistics import bootstrap
from drivetrain.tune import budget, decide, population, sampling
from drivetrain.tune.budget import Budget
from drivetrain.tune.decide import Work
from drivetrain.tune.journal import Asked, Ended, Fork, Promoted, State
from drivetrain.tune.settings import Settings, Study

BUDGET = 16 * LAST
POPULATION = BUDGET // LAST
PERTURBED = 3 * EVERY
"""Steps after which members of a population are compared, ours and Ray's."""
NUM_SEEDS = 5
NUM_DRAWN = 108
"""Trials of the comparison with and without early stopping."""
_RAY_WORKERS = 2


@dataclass(frozen=True)
class Result:
    """One study of one arm."""

    arm: str
    seed: int
    val: float
    test: float
    steps: int
    trials: int
    seconds: float


@dataclass
class InProcess:
    """Trials of one study of ours, trained here; one that waits at a rung is kept as it is."""

    study: Study
    trainings: dict[int, Training] = field(default_factory=dict)
    points: dict[tuple[int, int], Point] = field(default_factory=dict)
    steps: int = 0

    def begin(self, asked: Asked) -> None:
        training = Training(asked.values, self.study.settings.seed)
        if asked.fork is not None:
            # the donor trains on, and its tensors with it
            donor = copy.deepcopy(self.trainings[asked.fork.donor].state())
            training.load(donor, asked.values)
        self.trainings[asked.trial] = training

    def train(self, work: Work, state: State) -> Ended:
        """To the rung, by one evaluation after the other, as the run of a trial."""
        training = self.trainings[work.trial]
        before = training.step
        ends = (*self.study.settings.rungs, LAST)
        for step in range(before + EVERY, ends[work.rung] + EVERY, EVERY):
            point = training.train_to(min(step, ends[work.rung]))
        self.points[work.trial, work.rung] = point
        self.steps += training.step - before
        last = state.last(work.trial)
        spent = (last.spent or 0.0 if last is not None else 0.0) + training.step - before
        return Ended(work.trial, work.rung, "done", point.step, point.val, spent=spent)


def search(settings: Settings, most: Budget | None) -> tuple[State, InProcess]:
    """A study to its end, or to its budget's, in the driver's order."""
    study = Study(Path("in process"), settings, SPACE)
    state, trials = State(), InProcess(study)

    def affords(rung: int) -> bool:
        return most is None or budget.affords(most, state, (), rung)

    while True:
        if settings.population and (due := population.next_fork(study, state)) is not None:
            fork = Fork(due.donor, due.rung, due.step, due.member, "in process")
            state.take(asked := Asked(due.trial, due.values, fork))
            trials.begin(asked)
            continue
        if settings.schedule == "eager":
            for each in decide.newly_promoted(settings, state):
                state.take(Promoted(each.trial, each.rung))
        work = next((w for w in decide.ready(settings, state) if affords(w.rung)), None)
        if work is not None:
            state.take(trials.train(work, state))
            continue
        if decide.next_trial(settings, state) is None or not affords(0):
            return state, trials
        state.take(asked := sampling.ask(study, state))
        trials.begin(asked)


def ours(arm: str, seed: int, most: int = BUDGET, **changes: Any) -> Result:
    """As many trials as the budget lets begin; or those of `num_trials`, with no budget."""
    began_s = time.perf_counter()
    given: dict[str, Any] = {"num_trials": 9 * most // EVERY, "generation": 9, **changes}
    settings = Settings("in process", (), seed=seed, **given)
    state, trials = search(settings, Budget(most, "flops") if most else None)
    best = decide.winner(settings, state)
    if best is None:
        raise RuntimeError("no trial has a value")
    point = trials.points[best.trial, best.rung]
    took_s = time.perf_counter() - began_s
    return Result(arm, seed, point.val, point.test, trials.steps, len(state.asked), took_s)


def optuna_alone(arm: str, seed: int, pruner: str) -> Result:
    """Ask, train, report, prune, tell; the last trial is pruned where the budget ends."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    pruners: dict[str, Any] = {
        "none": optuna.pruners.NopPruner,
        "halving": partial(optuna.pruners.SuccessiveHalvingPruner, EVERY, 3),
        "hyperband": partial(optuna.pruners.HyperbandPruner, EVERY, LAST, 3),
        "median": optuna.pruners.MedianPruner,
    }
    began_s, steps = time.perf_counter(), 0
    points: dict[int, Point] = {}
    sampler = optuna.samplers.TPESampler(seed=seed)
    study = optuna.create_study(sampler=sampler, pruner=pruners[pruner]())
    while steps + EVERY <= BUDGET:
        trial = study.ask()
        training = Training(sampling.suggested(SPACE, trial), seed)
        is_pruned = False
        while training.step < LAST and not is_pruned:
            point = points[trial.number] = training.train_to(training.step + EVERY)
            steps += EVERY
            trial.report(point.val, point.step)
            is_over = point.step == LAST
            is_pruned = not is_over and (trial.should_prune() or steps + EVERY > BUDGET)
        if is_pruned:
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        else:
            study.tell(trial, point.val)
    best, took_s = points[study.best_trial.number], time.perf_counter() - began_s
    return Result(arm, seed, best.val, best.test, steps, len(study.trials), took_s)


def _within(config: dict[str, Any]) -> dict[str, Any]:
    """Ray multiplies values out of their range; ours stay in it."""
    for key, given in RANGES.items():
        config[key] = min(max(config[key], given.low), given.high)
    return config


def ray_tune(arm: str, seed: int, folder: Path, *, is_population: bool) -> Result:
    """Its scheduler and searcher, until the budget is spent; Ray runs already."""
    import optuna
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler, PopulationBasedTraining
    from ray.tune.search.basic_variant import BasicVariantGenerator
    from ray.tune.search.optuna import OptunaSearch

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    random.seed(seed)
    space = {
        key: (tune.loguniform if given.log else tune.uniform)(given.low, given.high)
        for key, given in RANGES.items()
    }

    class Spent(tune.Stopper):  # type: ignore[misc]
        steps = 0

        def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:  # noqa: ARG002
            self.steps += EVERY
            return bool(result["step"] >= LAST)

        def stop_all(self) -> bool:
            return self.steps + EVERY > BUDGET

    if is_population:
        said: dict[str, Any] = {
            "scheduler": PopulationBasedTraining(
                "step",
                perturbation_interval=PERTURBED,
                hyperparam_mutations=dict(space),
                custom_explore_fn=_within,
            ),
            "search_alg": BasicVariantGenerator(random_state=seed, max_concurrent=_RAY_WORKERS),
            "num_samples": POPULATION,
        }
    else:
        said = {
            "scheduler": ASHAScheduler("step", max_t=LAST, grace_period=EVERY, reduction_factor=3),
            "search_alg": OptunaSearch(sampler=optuna.samplers.TPESampler(seed=seed)),
            "num_samples": -1,
            "max_concurrent_trials": 1,
        }
    spent, began_s = Spent(), time.perf_counter()
    param_space = {**space, "seed": seed, "saves": is_population}
    found = local_ray.fit(ray_trial, param_space, folder, stop=spent, **said)
    best = found.get_best_result().metrics
    took_s = time.perf_counter() - began_s
    return Result(arm, seed, best["loss"], best["test"], spent.steps, len(found), took_s)


Arm = Callable[[str, int], Result]
Wanted = Callable[[str, int], bool]
RUNGS = (EVERY, 3 * EVERY)
_POPULATION: Mapping[str, Any] = {
    "sampler": "random",
    "rungs": tuple(range(PERTURBED, LAST, PERTURBED)),
    "population": POPULATION,
    "generation": POPULATION,
    "num_trials": POPULATION,
}
OURS: Mapping[str, Mapping[str, Any]] = {
    "drivetrain, random, all to the end": {"sampler": "random"},
    "drivetrain, TPE, all to the end": {},
    "drivetrain, halving, pause": {"rungs": RUNGS},
    "drivetrain, halving, eager": {"rungs": RUNGS, "schedule": "eager"},
    "drivetrain, halving, stop": {"rungs": RUNGS, "promote": "stop"},
    "drivetrain, halving, stop, generation 3": {"rungs": RUNGS, "promote": "stop", "generation": 3},
    "drivetrain, population": _POPULATION,
    "drivetrain, population, pb2": {**_POPULATION, "explore": "pb2"},
}
OPTUNA = {
    "optuna, TPE, all to the end": "none",
    "optuna, SuccessiveHalvingPruner": "halving",
    "optuna, HyperbandPruner": "hyperband",
    "optuna, MedianPruner": "median",
}
RAY = {"ray tune, ASHA": False, "ray tune, PBT": True}
SAVING: Mapping[str, Mapping[str, Any]] = {
    "all to the end": {},
    "halving, rungs 27 and 81, generation 9": {"rungs": RUNGS},
    "halving, rungs 9, 27 and 81, generation 27": {"rungs": (9, *RUNGS), "generation": 27},
}


def here() -> dict[str, Arm]:
    """Arms of this process."""
    found: dict[str, Arm] = {arm: partial(ours, **said) for arm, said in OURS.items()}
    return found | {arm: partial(optuna_alone, pruner=pruner) for arm, pruner in OPTUNA.items()}


def on_ray(folder: Path) -> dict[str, Arm]:
    return {
        arm: partial(ray_tune, folder=folder, is_population=is_population)
        for arm, is_population in RAY.items()
    }


def measure(seeds: Sequence[int], is_wanted: Wanted, *, has_ray: bool) -> Iterator[Result]:
    """Seed by seed. Ray's come last: no loss depends on what runs beside it, and Ray takes long."""
    for seed in seeds:
        for arm, run in {**here(), **saving()}.items():
            if is_wanted(arm, seed):
                yield run(arm, seed)
    wanted = [(arm, seed) for seed in seeds for arm in RAY if has_ray and is_wanted(arm, seed)]
    if wanted:
        with local_ray.started(_RAY_WORKERS) as folder:
            for arm, seed in wanted:
                yield on_ray(folder)[arm](arm, seed)


def saving() -> dict[str, Arm]:
    """The same trials, drawn at random, with and without early stopping."""
    said: dict[str, Any] = {"num_trials": NUM_DRAWN, "sampler": "random", "most": 0}
    return {arm: partial(ours, **{**said, **more}) for arm, more in SAVING.items()}


def table(found: Sequence[Result], machine: str) -> str:
    """For people."""
    lines = [
        "# What is found with the same number of training steps",
        "",
        f"`benchmarks/tune/quality.py` ({machine}): digits, {BUDGET:,} training steps in all,"
        f" {LAST} a trial at most. Loss of the trial that each tool names as its best: median over"
        " the seeds with its 95 % interval (bootstrap), and least to most. Test: on"
        " images that no arm has seen.",
        "",
        "| arm | seeds | validation loss | 95 % | least to most | test loss | trials | steps |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for arm in (*OURS, *OPTUNA, *RAY):
        rows = [each for each in found if each.arm == arm]
        if rows:
            lines.append(f"| {arm} | {len(rows)} | {_figures(rows)} |")
    lines += [
        "",
        f"**What early stopping saves.** The same {NUM_DRAWN} trials, drawn at random, without a"
        " budget:",
        "",
        "| trials | validation loss | 95 % | least to most | test loss | trials | steps | of all |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for arm in SAVING:
        rows = [each for each in found if each.arm == arm]
        share = median(each.steps for each in rows) / (NUM_DRAWN * LAST)
        lines.append(f"| {arm} | {_figures(rows)} | 1/{1 / share:.1f} |")
    return "\n".join([*lines, ""])


def _figures(rows: Sequence[Result]) -> str:
    losses = [each.val for each in rows]
    middle = bootstrap(losses)
    trials, steps = (median(getattr(each, name) for each in rows) for name in ("trials", "steps"))
    return (
        f"{middle.value:.4f} | {middle.low:.4f} to {middle.high:.4f} |"
        f" {min(losses):.4f} to {max(losses):.4f} |"
        f" {median(each.test for each in rows):.4f} | {trials:.0f} | {steps:,.0f}"
    )


def main(folder: Path, num_seeds: int, arms: Sequence[str]) -> None:
    """Measure what is missing, write both files anew after each study, and print the table."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "quality.json"
    kept = json.loads(file.read_text())["samples"] if file.exists() else []
    found = [Result(**sample) for sample in kept]
    known = {(each.arm, each.seed) for each in found}

    def is_wanted(arm: str, seed: int) -> bool:
        return (arm, seed) not in known and (not arms or arm in arms)

    machine = f"{os.cpu_count()} cores, Python {platform.python_version()}"
    has_ray = importlib.util.find_spec("ray") is not None
    for result in measure(range(num_seeds), is_wanted, has_ray=has_ray):
        found.append(result)
        document = {"machine": machine, "samples": [*map(asdict, found)]}
        file.write_text(json.dumps(document, indent=1) + "\n")
    (folder / "quality.md").write_text(table(found, machine))
    print(table(found, machine))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("arms", nargs="*", metavar="ARM")
    parser.add_argument("--seeds", type=int, default=NUM_SEEDS)
    said = parser.parse_args()
    main(said.folder, said.seeds, said.arms)

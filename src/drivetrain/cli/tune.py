"""`drivetrain tune`: run, list, show and export studies."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from drivetrain.cli.say import hand_on, say
from drivetrain.cluster.file import load_cluster
from drivetrain.core import locks
from drivetrain.core.errors import ConfigError, DrivetrainError, Problem
from drivetrain.core.text import plain
from drivetrain.launch import submission, template
from drivetrain.launch.request import Request, read_request
from drivetrain.tune import STUDY_FILE, budget, decide, fit, fork, lineage, rows, warm_start
from drivetrain.tune.by_number import grid
from drivetrain.tune.driver import LOCK, Driver
from drivetrain.tune.journal import State, read_journal
from drivetrain.tune.meter import Meter, price_per_device_hour
from drivetrain.tune.pareto import values_of
from drivetrain.tune.places import places_for
from drivetrain.tune.sampling import require_libraries, values_as_words
from drivetrain.tune.settings import (
    Settings,
    Study,
    checked_settings,
    load_study,
    open_study,
)
from drivetrain.tune.space import read_space, short_key, short_value
from drivetrain.tune.trial_run import Runner


def settings_from(values: dict[str, Any]) -> Settings:
    """The study's settings, from the options."""
    try:
        rungs = tuple(int(step) for step in values["rungs"].split(",") if step)
    except ValueError:
        remedy = "--rungs 20,60"
        raise ConfigError([Problem("--rungs", "not steps", remedy, values["rungs"])]) from None
    found = {**values, "rungs": rungs, **_of_population(values), **_objectives(values)}
    return checked_settings(found, "--")


def _objectives(values: dict[str, Any]) -> dict[str, Any]:
    """Settings from `--objective NAME:min`; the first objective replaces --metric and --mode."""
    said = values.pop("objectives", None) or []
    if not said:
        return {}
    if (values["metric"], values["mode"]) != ("loss", "min"):
        rule, remedy = "--objective names every objective", "leave --metric and --mode out"
        raise ConfigError([Problem("--metric", rule, remedy, values["metric"])])
    pairs = [each.partition(":") for each in said]
    if wrong := [name for name, _, mode in pairs if not name or mode not in ("", "min", "max")]:
        rule, remedy = "not NAME:min or NAME:max", "--objective loss:min --objective time_s:min"
        raise ConfigError([Problem("--objective", rule, remedy, wrong[0])])
    found = [{"metric": name, "mode": mode or "min"} for name, _, mode in pairs]
    return {**found[0], "further": tuple(found[1:])}


def _of_population(values: dict[str, Any]) -> dict[str, Any]:
    """Settings of a population: its factors as numbers; its members form one generation."""
    try:
        factors = tuple(map(float, values.get("perturb", "0.8,1.2").split(",")))
    except ValueError:
        factors = ()
    if len(factors) != 2:
        rule, remedy = "not two factors", "--perturb 0.8,1.2"
        raise ConfigError([Problem("--perturb", rule, remedy, values["perturb"])])
    size = values.get("population", 0)
    if not size:
        return {"perturb": factors}
    if values["num_trials"] not in (0, size):
        rule = f"a population of {size} starts with that many"
        raise ConfigError([Problem("--trials", rule, "leave it out", values["num_trials"])])
    return {"perturb": factors, "num_trials": size, "generation": size}


def run(settings: Settings, space: str, path: str, num_parallel: int, on: str) -> None:
    """Run a study to its end, from wherever it is."""
    require_libraries(settings)
    if num_parallel < 1:
        raise ConfigError([Problem("--parallel-trials", "must be at least 1", "1", num_parallel)])
    path = path or f"studies/{Path(settings.script).stem}"
    request = _request(settings, Path(path), on)
    job = request.job
    settings = dataclasses.replace(
        settings, script_args=job.script_args, nodes_per_trial=job.num_nodes
    )
    places = places_for(request.target, job, num_parallel)
    given = read_space(space)
    if settings.sampler == "grid" and not settings.num_trials:
        settings = dataclasses.replace(settings, num_trials=len(grid(given)))
    if settings.cluster:
        load_cluster(settings.cluster)  # reports an unknown name now
    _check_budget(settings, Path(path))
    earlier = warm_start.prepare(Path(path), settings, given)
    study = open_study(Path(path), settings, given)
    warm_start.keep(study, earlier)
    runner = Runner(study, request.target, job, places)
    try:
        planner = fit.Planner(study, _say_now)
        spent_by = Meter(runner, planner).spent if settings.budget else None
        with _warm(request):
            Driver(study, runner, num_parallel, _say_now, planner, spent_by).run()
    except KeyboardInterrupt:
        say("running trials continue on their own; the same command adopts them", err=True)
        say(f"to stop them: drivetrain tune stop {shlex.quote(path)}", err=True)
        sys.exit(130)
    show(path, None)
    _say_if_more(settings, read_journal(study.path))
    if not decide.best(settings, read_journal(study.path)):
        raise DrivetrainError("no trial has a result")


def _warm(request: Request) -> AbstractContextManager[None]:
    """Fork local trials from a template, unless the job sets variables: torch may read them."""
    job = request.job
    if request.target.name != "local" or job.environment or job.secrets:
        return nullcontext()
    return template.kept(job.script)


def _say_if_more(settings: Settings, state: State) -> None:
    """Tell how to continue a study whose budget is used up."""
    waiting = len(decide.ready(settings, state))
    to_come = settings.num_trials - len(state.asked)
    if settings.budget and (waiting or to_come > 0):
        what = f"{waiting} wait to continue, {max(0, to_come)} were not started"
        say(f"budget used up: {what}; the same command with a larger --budget resumes")


def _check_budget(settings: Settings, path: Path) -> None:
    """Check the budget's form, that a price is known, and that its unit has not changed."""
    if settings.budget and budget.parse(settings.budget).unit == "usd":
        price_per_device_hour(settings)
    if not (path / STUDY_FILE).exists():
        return
    had = load_study(path).settings.budget
    units = {budget.parse(each).unit if each else "" for each in (had, settings.budget)}
    if len(units) > 1 and read_journal(path).ended:
        rule = f"was {had or 'none'} when the study began, and its unit cannot change"
        remedy = "use the same unit, or another --study"
        raise ConfigError([Problem("--budget", rule, remedy, settings.budget or "none")])


def _request(settings: Settings, path: Path, on: str) -> Request:
    """The request that `drivetrain train --on` makes of the same flags; ConfigError if invalid."""
    trials, ranks = str((path / "trials").absolute()), settings.processes_per_trial
    argv = [
        f"--on={on or 'local'}",
        f"--job-name={path.absolute().name}",
        f"--nproc-per-node={ranks}",
        f"--run-dir={trials}",
    ]
    # with --on, flags of the job stand among the script's arguments; without, all are the script's
    script = [f"--script={settings.script}"] if on else [settings.script, "--"]
    request = read_request([*argv, *script, *settings.script_args])
    if request is None:  # --on was named
        raise AssertionError(on)
    job, target = request.job, request.target
    problems = target.problems(job)
    for flag, is_wrong, remedy in (
        ("--nproc-per-node", job.processes_per_node != ranks, f"use --nproc-per-trial {ranks}"),
        ("--run-dir", job.run_dir != trials, "use --study DIR"),
        ("--nnodes", job.is_elastic, "use the same number of nodes for every trial"),
        ("--dry-run", request.is_dry_run, "drivetrain train --dry-run shows one run"),
        ("--wait", request.waits, "leave it out: tune always waits for the study"),
    ):
        if is_wrong:
            problems.append(Problem(flag, "cannot be used in a study", remedy, has_value=False))
    if getattr(target, "run_is_elsewhere", False):
        volume = Path(target.run_dir_of(job)).parent  # type: ignore[attr-defined]
        if not volume.is_dir():
            rule = "results are read from the trials' volume, which is not mounted here"
            remedy = "mount the claim on this machine, at the same path"
            problems.append(Problem("--mount-path", rule, remedy, str(volume)))
    if problems:
        raise ConfigError(problems)
    return request


def _say_now(text: str) -> None:
    say(text)
    sys.stdout.flush()


def stop(path: str) -> None:
    """Ask every running trial to save and stop."""
    study = load_study(Path(path))
    if (driver := locks.holder(study.path / LOCK)) is not None:
        rule = f"process {driver[1]} on {driver[0]} drives it, and would resume its trials"
        raise ConfigError([Problem("STUDY", rule, "stop that process first (Ctrl-C)", path)])
    state = read_journal(study.path)
    asked = 0
    for work in decide.ready(study.settings, state):
        made = submission.find(study.run_dir(work.trial))
        if made is not None and not made.status().state.is_over:
            submission.stop(study.run_dir(work.trial))
            asked += 1
    say(f"{asked} trials asked to save and stop; the command that started the study resumes it")


def ls(folder: str) -> None:
    """Print one line per study."""
    found = [path.parent for path in sorted(Path(folder).glob(f"*/{STUDY_FILE}"))]
    found = [Path(folder)] if (Path(folder) / STUDY_FILE).exists() else found
    if not found:
        rule, remedy = "contains no study", "create one with drivetrain tune SCRIPT --space …"
        raise ConfigError([Problem("FOLDER", rule, remedy, folder)])
    for path in found:
        try:
            say(_line(load_study(path), read_journal(path)))
        except DrivetrainError as error:
            say(f"damaged  {path}  ({error})")


def _line(study: Study, state: State) -> str:
    settings = study.settings
    over = sum(decide.is_over(settings, state, trial) for trial in range(len(state.asked)))
    best = decide.winner(settings, state)
    words = [f"{over}/{settings.num_trials} trials", str(study.path), settings.sampler]
    if settings.population:
        words[0] = f"{over}/{len(state.asked)} trials of {settings.population} members"
    if settings.budget:
        words.append(f"spent {budget.parse(settings.budget).shown(budget.spent(state))}")
    if settings.further and decide.best(settings, state):
        words.append(rows.on_front(study, rows.rows_of(study, state)))
    elif best is not None:
        words.append(f"best {settings.metric} {best.value:.6g} (trial {best.trial})")
    return "  ".join(words)


def verify(path: str, trial: int | None) -> int:
    """Replay a trial, by default the best; return 1 if it does not end with the same bits."""
    study = load_study(Path(path))
    state = read_journal(study.path)
    best = decide.winner(study.settings, state)
    if trial is None and study.settings.further and decide.best(study.settings, state):
        rule = "a study of several objectives has no best trial"
        raise ConfigError(
            [Problem("--trial", rule, "name one on the Pareto front", has_value=False)]
        )
    if trial is None and best is None:
        raise DrivetrainError("no trial has a result")
    number = best.trial if trial is None and best is not None else trial
    if number is None or not 0 <= number < len(state.asked):
        remedy = f"use 0 to {len(state.asked) - 1}" if state.asked else "none has started"
        raise ConfigError([Problem("--trial", "no such trial", remedy, trial)])
    from drivetrain.tune.replay import replay  # imports torch

    done = replay(study, state, number)
    for part in done.segments:
        end = "its end" if part.stop_at is None else f"step {part.stop_at}"
        say(f"trial {part.trial} to {end}: {' '.join(values_as_words(part.values))}")
    say(f"weights after step {done.step}, SHA-256")
    say(f"  study   {done.study_sha256}")
    say(f"  replay  {done.replay_sha256}")
    if done.is_same:
        say(f"equal: {done.num_identical} tensors, including the optimizer's and the ranks' state")
        return 0
    for each in done.differences[:10]:
        say(f"  {each.name}: {each.what} {each.here} {each.there}".rstrip())
    say(f"not equal; the replay is kept in {done.folder}")
    return 1


def show(path: str, trial: int | None) -> None:
    """Print a study's trials, the best first, or one of them."""
    study = load_study(Path(path))
    state = read_journal(study.path)
    found = rows.rows_of(study, state)
    if trial is not None:
        _show_one(study, found, trial)
        return
    say(_line(study, state))
    names = [each.metric for each in study.settings.objectives]
    heads = "  ".join(f"{name:>10}" for name in names)
    say(f"{'trial':>5}  {'state':<10}  {'step':>6}  {heads}  values")
    for row in rows.best_first(study, found):
        values = [f"{row.objectives[name]:.6g}" if row.objectives else "" for name in names]
        value = "  ".join(
            f"{each:>{max(10, len(n))}}" for n, each in zip(names, values, strict=True)
        )
        shown = " ".join(f"{short_key(key)}={short_value(v)}" for key, v in row.values.items())
        mark = "  *" if row.is_best else ""
        say(f"{row.trial:>5}  {row.state:<10}  {row.step:>6}  {value}  {shown}{mark}")
    if study.settings.population:
        say("lineage")
        state = read_journal(study.path)
        for text in lineage.tree(study, state):
            say(f"  {text}")
        for asked in state.asked:
            if asked.fork is not None and fork.needs_donor(study, state, asked):
                say(f"trial {asked.trial} has not saved yet: {asked.fork.checkpoint} is kept")


def _show_one(study: Study, found: list[rows.Row], trial: int) -> None:
    row = next((each for each in found if each.trial == trial), None)
    if row is None:
        remedy = f"use 0 to {len(found) - 1}" if found else "none has started"
        raise ConfigError([Problem("--trial", "no such trial", remedy, trial)])
    place = "  (on the Pareto front)" if study.settings.further else "  (the best)"
    say(f"trial {trial}: {row.state}{place if row.is_best else ''}")
    ended = read_journal(study.path).ended
    for end in (ended[at] for at in sorted(ended) if at[0] == trial):
        pairs = zip(study.settings.objectives, values_of(study.settings, end), strict=False)
        value = "".join(f"  {each.metric} {value:.17g}" for each, value in pairs)
        say(f"rung {end.rung}: {end.outcome}  step {end.step}{value}  {end.reason}".rstrip())
    say(f"run directory: {row.run_dir}")
    if row.fork is not None:
        say(f"started from: trial {row.fork.donor} at step {row.fork.step} ({row.fork.checkpoint})")
        again = f"drivetrain tune verify {shlex.quote(str(study.path))} --trial {trial}"
        say(f"to replay it from the root: {again}")
        return
    settings = study.settings
    command = ["drivetrain", "train", settings.script]
    command += [f"--nnodes={settings.nodes_per_trial}"] if settings.nodes_per_trial > 1 else []
    command += [f"--nproc-per-node={settings.processes_per_trial}", *settings.script_args]
    say(f"to run it on its own: {shlex.join([*command, *values_as_words(row.values)])}")


def export(path: str, form: str, output: str | None) -> None:
    """Write every trial as CSV or JSON."""
    found = rows.rows_of(load_study(Path(path)))
    text = rows.as_json(found) if form == "json" else rows.as_csv(found)
    if output is None:
        hand_on(plain(text))
    else:
        Path(output).write_text(text)
        say(f"{len(found)} trials → {output}")

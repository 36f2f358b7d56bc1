"""Search over runs."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from drivetrain.cli.commands import Verbs
from drivetrain.cli.reading import reading

Folder = Annotated[str, typer.Argument(metavar="STUDY", help="Directory of the study.")]


class _RunByDefault(Verbs):
    """`tune SCRIPT …` drives a study; `tune ls` and the like look at one."""

    default_verb = "run"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("--help", "-h"):
            args = [self.default_verb, *args]
        return super().parse_args(ctx, args)


verbs = typer.Typer(
    cls=_RunByDefault,
    no_args_is_help=True,
    help="Search: `tune SCRIPT --space FILE --trials N` drives one; ls, show, plot, verify …",
)


@verbs.command(
    name="run", context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
)
def run_study(  # noqa: PLR0913, PLR0917 - flags
    context: typer.Context,
    script: Annotated[str, typer.Argument(metavar="SCRIPT")],
    space: Annotated[str, typer.Option(help="YAML or Python file: config keys and their ranges.")],
    trials: Annotated[int, typer.Option(help="How many; a grid and a population have theirs.")] = 0,
    nproc_per_trial: Annotated[int, typer.Option(help="Ranks of each trial.")] = 1,
    parallel_trials: Annotated[int, typer.Option(help="Trials at a time.")] = 1,
    study: Annotated[
        str, typer.Option(help="The study's directory; the same command resumes it.")
    ] = "",
    metric: Annotated[str, typer.Option(help="Of the evaluations: loss, accuracy …")] = "loss",
    mode: Annotated[str, typer.Option(help="min or max.")] = "min",
    objective: Annotated[
        list[str] | None,
        typer.Option(
            help="Several, instead of --metric: loss:min, accuracy:max, time_s:min, cost:min; "
            "a Pareto front is found."
        ),
    ] = None,
    sampler: Annotated[
        str, typer.Option(help="tpe, random, gp, cmaes, nsgaii, qmc, grid (every combination).")
    ] = "tpe",
    seed: Annotated[int, typer.Option(help="Every draw follows from it.")] = 0,
    schedule: Annotated[
        str,
        typer.Option(
            help="deterministic: the same result on any number of workers. eager: by what is known."
        ),
    ] = "deterministic",
    generation: Annotated[
        int, typer.Option(help="Trials that know the same results, and compete at the rungs.")
    ] = 8,
    rungs: Annotated[
        str, typer.Option(help="Steps at which trials pause and the best go on: 20,60.")
    ] = "",
    factor: Annotated[int, typer.Option(help="At a rung one of so many goes on.")] = 3,
    stopping: Annotated[
        str, typer.Option(help="Who goes on at --rungs: successive-halving, hyperband, median.")
    ] = "successive-halving",
    promote: Annotated[
        str,
        typer.Option(
            help="pause: trials wait at a rung for each other. stop: each goes straight on or ends."
        ),
    ] = "pause",
    patience: Annotated[
        int | None, typer.Option(help="End a trial after so many evaluations without a better one.")
    ] = None,
    warm_start: Annotated[
        str, typer.Option(help="An earlier study, whose finished trials are known from the start.")
    ] = "",
    population: Annotated[
        int, typer.Option(help="Population based training: members that fork at the rungs.")
    ] = 0,
    quantile: Annotated[
        float, typer.Option(help="Part of a population that is replaced, by forks of the best.")
    ] = 0.25,
    explore: Annotated[
        str,
        typer.Option(
            help="How a fork's values come about: perturb (by chance, near its donor's) or pb2 "
            "(numbers by a Gaussian process of what members have gained so far)."
        ),
    ] = "perturb",
    perturb: Annotated[
        str, typer.Option(help="A fork's numbers are its donor's times one of these.")
    ] = "0.8,1.2",
    resample: Annotated[
        float, typer.Option(help="How likely a fork's value is drawn anew instead.")
    ] = 0.25,
    cluster: Annotated[
        str,
        typer.Option(
            help="cluster.yaml or NAME:COUNT (h100:8): trials that cannot fit there are dropped."
        ),
    ] = "",
    budget: Annotated[
        str,
        typer.Option(
            help="12h (device-hours), 200USD or 1e18flops: nothing begins that would exceed it."
        ),
    ] = "",
    max_restarts: Annotated[int, typer.Option(help="Of a trial whose supervisor is killed.")] = 3,
    on: Annotated[
        str,
        typer.Option(
            help="Where trials run: local (the default), slurm, ray, hosts, kubernetes. Its flags "
            "(`train --on TARGET --help`) then stand after SCRIPT, before the script's words."
        ),
    ] = "",
) -> None:
    """Drive a study: trials are runs of SCRIPT; further words go to it (path.to.key=value)."""
    from drivetrain.cli.tune import run, settings_from

    values = {
        "script": script,
        "script_args": tuple(context.args),
        "num_trials": trials,
        "processes_per_trial": nproc_per_trial,
        "metric": metric,
        "mode": mode,
        "objectives": objective,
        "sampler": sampler,
        "seed": seed,
        "schedule": schedule,
        "generation": generation,
        "rungs": rungs,
        "factor": factor,
        "stopping": stopping,
        "promote": promote,
        "patience": patience,
        "warm_start": warm_start,
        "population": population,
        "quantile": quantile,
        "explore": explore,
        "perturb": perturb,
        "resample": resample,
        "cluster": cluster,
        "budget": budget,
        "max_restarts": max_restarts,
    }
    run(settings_from(values), space, study, parallel_trials, on)


@verbs.command()
def ls(
    folder: Annotated[str, typer.Argument(metavar="[FOLDER]", help="A folder of studies.")] = (
        "studies"
    ),
) -> None:
    """List studies: how far they are, and their best trial."""
    from drivetrain.cli.tune import ls as list_studies

    with reading(folder):
        list_studies(folder)


@verbs.command()
def show(
    study: Folder,
    trial: Annotated[int | None, typer.Option(help="Only this one, with all it has done.")] = None,
) -> None:
    """Show a study's trials, the best first."""
    from drivetrain.cli.tune import show as show_study

    with reading(study):
        show_study(study, trial)


@verbs.command()
def export(
    study: Folder,
    form: Annotated[str, typer.Option("--format", help="csv or json.")] = "csv",
    output: Annotated[str | None, typer.Option("-o", "--output", help="A file.")] = None,
) -> None:
    """Export every trial with its values and result."""
    from drivetrain.cli.tune import export as export_study

    with reading(study):
        export_study(study, form, output)


@verbs.command()
def verify(
    study: Folder,
    trial: Annotated[int | None, typer.Option(help="Not the best, but this one.")] = None,
) -> None:
    """Train a trial once more from the root of its line: does it end with the same bits?"""
    from drivetrain.cli.tune import verify as verify_trial

    raise typer.Exit(verify_trial(study, trial))


@verbs.command()
def plot(
    study: Folder,
    output: Annotated[str, typer.Option("--output", "-o", help="File to write.")] = "study.html",
) -> None:
    """Draw a study: Pareto front, history, rungs, parameters and what each decides; one page."""
    from drivetrain.cli.looking import plot as plot_study

    with reading(study):
        plot_study(study, output)


@verbs.command()
def predict(
    studies: Annotated[
        list[str], typer.Argument(metavar="STUDY:SIZE", help="Studies, each with its size.")
    ],
    size: Annotated[float, typer.Option("--for", help="The size that was not searched.")],
    parameter: Annotated[
        str, typer.Option(help="A searched number above 0.")
    ] = "optimization.learning_rate",
) -> None:
    """Predict where a parameter is best for a larger model, from studies of smaller ones."""
    from drivetrain.cli.predicting import predict as predict_value

    predict_value(studies, size, parameter)


@verbs.command()
def stop(study: Folder) -> None:
    """Ask the study's trials that run to save and stop."""
    from drivetrain.cli.tune import stop as stop_study

    stop_study(study)

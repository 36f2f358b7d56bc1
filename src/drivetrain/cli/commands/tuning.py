"""`drivetrain tune`: search over runs."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from drivetrain.cli.commands import Verbs
from drivetrain.cli.reading import reading

Folder = Annotated[str, typer.Argument(metavar="STUDY", help="Directory of the study.")]


class _RunByDefault(Verbs):
    """`tune SCRIPT …` runs a study; `tune ls`, `show` … inspect studies."""

    default_verb = "run"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("--help", "-h"):
            args = [self.default_verb, *args]
        return super().parse_args(ctx, args)


verbs = typer.Typer(
    cls=_RunByDefault,
    no_args_is_help=True,
    help="Hyperparameter search: `tune SCRIPT --space FILE --trials N` runs a study.",
)


@verbs.command(
    name="run", context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
)
def run_study(  # noqa: PLR0913, PLR0917 - each is a flag
    context: typer.Context,
    script: Annotated[str, typer.Argument(metavar="SCRIPT")],
    space: Annotated[str, typer.Option(help="YAML or Python file: config keys and their ranges.")],
    trials: Annotated[
        int, typer.Option(help="Number of trials; not needed for a grid or a population.")
    ] = 0,
    nproc_per_trial: Annotated[int, typer.Option(min=1, help="Ranks per trial.")] = 1,
    parallel_trials: Annotated[int, typer.Option(help="Number of trials that run at a time.")] = 1,
    study: Annotated[
        str, typer.Option(help="The study's directory; the same command resumes it.")
    ] = "",
    metric: Annotated[
        str, typer.Option(help="Metric of the evaluations: loss, accuracy …")
    ] = "loss",
    mode: Annotated[str, typer.Option(help="min or max.")] = "min",
    objective: Annotated[
        list[str] | None,
        typer.Option(
            help="Repeatable, instead of --metric: loss:min, accuracy:max, time_s:min, cost:min; "
            "the study finds a Pareto front."
        ),
    ] = None,
    sampler: Annotated[
        str, typer.Option(help="tpe, random, gp, cmaes, nsgaii, qmc, grid (every combination).")
    ] = "tpe",
    seed: Annotated[int, typer.Option(help="Random seed of the study.")] = 0,
    schedule: Annotated[
        str,
        typer.Option(
            help="deterministic: same result on any number of workers. eager: by results so far."
        ),
    ] = "deterministic",
    generation: Annotated[
        int,
        typer.Option(help="Trials drawn from the same earlier results; they compete at rungs."),
    ] = 8,
    rungs: Annotated[
        str, typer.Option(help="Steps at which trials pause and the best continue: 20,60.")
    ] = "",
    factor: Annotated[int, typer.Option(help="At a rung one in FACTOR trials continues.")] = 3,
    stopping: Annotated[
        str, typer.Option(help="Rule at --rungs: successive-halving, hyperband, median.")
    ] = "successive-halving",
    promote: Annotated[
        str,
        typer.Option(
            help="pause: trials wait for each other at a rung. stop: each continues or ends there."
        ),
    ] = "pause",
    patience: Annotated[
        int | None,
        typer.Option(help="End a trial after this many evaluations without improvement."),
    ] = None,
    warm_start: Annotated[
        str,
        typer.Option(help="Earlier study whose finished trials the sampler knows from the start."),
    ] = "",
    population: Annotated[
        int, typer.Option(min=0, help="Population based training: members that fork at the rungs.")
    ] = 0,
    quantile: Annotated[
        float,
        typer.Option(help="Fraction of a population that forks of the best replace at a rung."),
    ] = 0.25,
    explore: Annotated[
        str,
        typer.Option(
            help="How a fork gets its values: perturb (at random, near its donor's) or pb2 "
            "(numbers from a Gaussian process over the members' gains so far)."
        ),
    ] = "perturb",
    perturb: Annotated[
        str, typer.Option(help="A fork's numbers are its donor's times one of these factors.")
    ] = "0.8,1.2",
    resample: Annotated[
        float, typer.Option(help="Probability that a fork's value is drawn from its range instead.")
    ] = 0.25,
    cluster: Annotated[
        str,
        typer.Option(
            help="cluster.yaml or NAME:COUNT (h100:8): trials that cannot fit on it are dropped."
        ),
    ] = "",
    budget: Annotated[
        str,
        typer.Option(
            help="12h (device-hours), 200USD or 1e18flops: no run starts that would exceed it."
        ),
    ] = "",
    max_restarts: Annotated[
        int, typer.Option(min=0, help="Restarts of a trial whose supervisor is killed.")
    ] = 3,
    on: Annotated[
        str,
        typer.Option(
            help="Where trials run: local (the default), slurm, ray, hosts, kubernetes. Its flags "
            "(`train --on TARGET --help`) follow SCRIPT, before the script's arguments."
        ),
    ] = "",
) -> None:
    """Run a study: trials are runs of SCRIPT; further arguments go to it (path.to.key=value)."""
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
    folder: Annotated[
        str, typer.Argument(metavar="[FOLDER]", help="Folder that holds the studies.")
    ] = ("studies"),
) -> None:
    """List studies with their progress and best trial."""
    from drivetrain.cli.tune import ls as list_studies

    with reading(folder):
        list_studies(folder)


@verbs.command()
def show(
    study: Folder,
    trial: Annotated[
        int | None, typer.Option(help="Show only this trial, with its history.")
    ] = None,
) -> None:
    """Show a study's trials, the best first."""
    from drivetrain.cli.tune import show as show_study

    with reading(study):
        show_study(study, trial)


@verbs.command()
def export(
    study: Folder,
    form: Annotated[str, typer.Option("--format", help="csv or json.")] = "csv",
    output: Annotated[str | None, typer.Option("-o", "--output", help="File to write.")] = None,
) -> None:
    """Export every trial with its values and result."""
    from drivetrain.cli.tune import export as export_study

    with reading(study):
        export_study(study, form, output)


@verbs.command()
def verify(
    study: Folder,
    trial: Annotated[int | None, typer.Option(help="Trial to replay; default: the best.")] = None,
) -> None:
    """Replay a trial from the root of its lineage and check that it ends bit for bit the same."""
    from drivetrain.cli.tune import verify as verify_trial

    raise typer.Exit(verify_trial(study, trial))


@verbs.command()
def plot(
    study: Folder,
    output: Annotated[str, typer.Option("--output", "-o", help="File to write.")] = "study.html",
) -> None:
    """Plot a study on one page: Pareto front, history, rungs, parameters and their importance."""
    from drivetrain.cli.looking import plot as plot_study

    with reading(study):
        plot_study(study, output)


@verbs.command()
def predict(
    studies: Annotated[
        list[str], typer.Argument(metavar="STUDY:SIZE", help="Studies, each with its model size.")
    ],
    size: Annotated[float, typer.Option("--for", help="Model size to predict for.")],
    parameter: Annotated[
        str, typer.Option(help="A searched numeric parameter with values above 0.")
    ] = "optimization.learning_rate",
) -> None:
    """Predict where a parameter is best for a larger model, from studies of smaller ones."""
    from drivetrain.cli.predicting import predict as predict_value

    predict_value(studies, size, parameter)


@verbs.command()
def stop(study: Folder) -> None:
    """Ask the study's running trials to save and stop."""
    from drivetrain.cli.tune import stop as stop_study

    stop_study(study)

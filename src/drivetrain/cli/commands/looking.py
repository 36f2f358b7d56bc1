"""Commands that show what a run did, and why."""

from __future__ import annotations

from typing import Annotated

import typer

from drivetrain.cli.commands import AsJson, RunAddress
from drivetrain.cli.reading import reading

verbs = typer.Typer()


@verbs.command()
def status(
    run: RunAddress, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
) -> None:
    """Show a run's step, loss, throughput, goodput and cost, and where every second went."""
    from drivetrain.cli import looking as verbs

    with reading(run):
        code = verbs.status(run, as_json=as_json)
    raise typer.Exit(code)


@verbs.command()
def runs(
    folder: Annotated[
        str, typer.Argument(metavar="[DIR]", help="Directory that holds the runs.")
    ] = "runs",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the runs under DIR (default: runs), most recently active first."""
    from drivetrain.cli import looking as verbs

    with reading(folder):
        code = verbs.runs(folder, as_json=as_json)
    raise typer.Exit(code)


@verbs.command()
def watch(
    run: RunAddress,
    every_s: Annotated[
        float, typer.Option("--every", min=0.1, help="Seconds between updates.")
    ] = 2,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and exit.")] = False,
) -> None:
    """Watch a run live: curves, ranks, where the time goes, latest events; or a study. q quits.

    Works on runs that are training or over, here or on remote storage; each update reads only what
    is new.
    """
    from drivetrain.cli import looking

    with reading(run):
        code = looking.watch(run, every_s, once=once)
    raise typer.Exit(code)


@verbs.command()
def report(
    run: RunAddress,
    output: Annotated[str, typer.Option("--output", "-o", help="File to write.")] = "report.html",
) -> None:
    """Write one page about a run: verdict, curves, where the time went, ranks, attempts, config.

    Or about a study: history, parameters, trials. The page is self-contained: no network, no
    JavaScript.
    """
    from drivetrain.cli import looking

    with reading(run):
        code = looking.report(run, output)
    raise typer.Exit(code)


@verbs.command()
def compare(
    run: RunAddress,
    other: Annotated[str, typer.Argument(metavar="OTHER_RUN", help="The run to compare with.")],
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", help="Also write an HTML page with overlaid curves."),
    ] = None,
) -> None:
    """Compare two runs side by side: settings that differ, and results."""
    from drivetrain.cli import looking

    with reading(run, other):
        code = looking.compare(run, other, output)
    raise typer.Exit(code)


@verbs.command()
def diagnose(
    run_dir: Annotated[str, typer.Argument(metavar="RUN", help="A run's directory or address.")],
    as_json: AsJson = False,
) -> None:
    """Find what went wrong in RUN, or is slow: rank, host, line and remedy.

    Reads only the run's directory: the run may be over, training, or on another machine. Exit code
    1 on an error.
    """
    from drivetrain.cli.looking import run_diagnosis

    with reading(run_dir):
        code = run_diagnosis(run_dir, as_json=as_json)
    raise typer.Exit(code)


@verbs.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
    },
    options_metavar="[OPTIONS] [FLAGS]",
)
def profile(
    context: typer.Context,
    ranks: Annotated[str, typer.Option(help="Ranks to profile: 0,1,… or all.")] = "0",
    steps: Annotated[
        str, typer.Option(help="Steps to profile, FIRST:LAST, counted from 1.")
    ] = "5:10",
    output: Annotated[
        str, typer.Option("--output", "-o", help="Folder for the traces.")
    ] = "profile",
    py_spy: Annotated[
        bool, typer.Option("--py-spy", help="Also record a flame graph of the Python code.")
    ] = False,
    nsys: Annotated[
        bool, typer.Option("--nsys", help="Print the Nsight Systems command and exit.")
    ] = False,
) -> None:
    """Run SCRIPT with torch's profiler on chosen ranks and steps, and summarize where time went.

    drivetrain profile [OPTIONS] [FLAGS] SCRIPT [ARGS]: flags and arguments are those of
    `drivetrain train`. The traces open in Perfetto and in TensorBoard.
    """
    from drivetrain.cli.profile import ProfileChoice, run

    raise typer.Exit(run(context.args, ProfileChoice(ranks, steps, output, py_spy, nsys)))

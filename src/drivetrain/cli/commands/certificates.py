"""Certificates for one's own script."""

from __future__ import annotations

from typing import Annotated

import typer

from drivetrain.cli.commands.options import AsJson

verbs = typer.Typer(help="Certificates for your own script.", no_args_is_help=True)


@verbs.command()
def resume(
    script: Annotated[list[str], typer.Argument(help="Your script and its arguments.")],
    steps: Annotated[int, typer.Option(help="Steps of the run; it is killed half-way.")] = 100,
    ranks: Annotated[int, typer.Option("--nproc-per-node", help="Processes.")] = 2,
    then: Annotated[
        int | None,
        typer.Option("--then-nproc", help="Processes after the kill; default: as before."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Certify that SCRIPT resumes exactly: N steps = N/2 + SIGKILL + N/2.

    The script must take its config from load_config(), so that max_steps and
    checkpoint.every_steps can be set.
    """
    from drivetrain.cli.verify import run

    raise typer.Exit(run(tuple(script), steps, ranks, then or ranks, as_json=as_json))


@verbs.command()
def parity(
    script: Annotated[list[str], typer.Argument(help="Your script and its arguments.")],
    layouts: Annotated[
        str,
        typer.Option(help="Comma-separated name:ranks or key=value@ranks: ddp:2,fsdp:4,hsdp:2x2"),
    ],
    steps: Annotated[int, typer.Option(help="Steps of each run.")] = 30,
    as_json: AsJson = False,
) -> None:
    """Certify that SCRIPT trains the same under each layout as on one process.

    Losses and gradient norms are compared step by step; where they diverge, the step and the module
    or parameter are named. The script must take its config from load_config().
    """
    from drivetrain.cli.verify import run_parity

    raise typer.Exit(run_parity(tuple(script), layouts, steps, as_json=as_json))

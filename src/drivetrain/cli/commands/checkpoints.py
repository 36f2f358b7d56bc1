"""`drivetrain checkpoint`: what a run has saved."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from drivetrain.cli.commands import Address, AsJson, OneCheckpoint, Verbs
from drivetrain.cli.reading import reading

verbs = typer.Typer(
    cls=Verbs, help="List, verify, export and compare checkpoints.", no_args_is_help=True
)


@verbs.command()
def ls(address: Address, as_json: AsJson = False) -> None:
    """List checkpoints, newest first, with size and state."""
    from drivetrain.cli import checkpoint as verbs

    with reading(address):
        code = verbs.ls(address, as_json=as_json)
    raise typer.Exit(code)


@verbs.command()
def verify(address: Address, as_json: AsJson = False) -> None:
    """Verify every byte. Exit code 1 when a checkpoint is damaged, or none is good."""
    from drivetrain.cli import checkpoint as verbs

    with reading(address):
        code = verbs.verify(address, as_json=as_json)
    raise typer.Exit(code)


@verbs.command()
def export(
    address: OneCheckpoint,
    target: Annotated[str, typer.Argument(help="New folder (safetensors) or .pt file to write.")],
    step: Annotated[int | None, typer.Option(help="Step to export; default: the newest.")] = None,
    best: Annotated[
        bool,
        typer.Option("--best", help="Export the best by checkpoint.keep_best, not the newest."),
    ] = False,
    ema: Annotated[
        bool,
        typer.Option("--ema", help="Export the averages of the EMA hook instead of the weights."),
    ] = False,
    form: Annotated[
        Literal["auto", "huggingface", "safetensors", "pt"],
        typer.Option(
            "--format",
            help="huggingface: weights, config and tokenizer for from_pretrained; safetensors: "
            "weights alone; pt: for torch.load. auto: chosen by the target and the checkpoint.",
        ),
    ] = "auto",
    max_shard_gb: Annotated[
        float, typer.Option(help="Largest file in GB; weights above it are split.")
    ] = 5.0,
) -> None:
    """Export the weights for other libraries, under the model's own names."""
    from drivetrain.cli import checkpoint as verbs

    with reading(address):
        code = verbs.export(address, target, step, max_shard_gb, form, best=best, averages=ema)
    raise typer.Exit(code)


@verbs.command()
def diff(here: OneCheckpoint, there: OneCheckpoint, as_json: AsJson = False) -> None:
    """Show what differs between two checkpoints. Exit code 1 when anything does."""
    from drivetrain.cli import checkpoint as verbs

    with reading(here, there):
        code = verbs.diff(here, there, as_json=as_json)
    raise typer.Exit(code)

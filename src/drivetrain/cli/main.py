"""`drivetrain`: verbs are imported when they are called, so that help answers at once."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from drivetrain._version import __version__
from drivetrain.core.errors import ConfigError, DrivetrainError

app = typer.Typer(
    help="One training script, from a laptop to thousands of devices, with the same numbers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

bench = typer.Typer(help="Measure, always next to the bare engine.", no_args_is_help=True)
app.add_typer(bench, name="bench")


def _show_version(value: bool) -> None:
    if value:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    pass


@app.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,  # after the script, --help is the script's
    },
    options_metavar="[FLAGS]",
)
def train(context: typer.Context) -> None:
    """Run SCRIPT on one or more processes: drivetrain train [FLAGS] SCRIPT [FLAGS] [ARGS].

    Any script that runs under torchrun runs unchanged, and all of torchrun's flags are understood.
    The most used ones:

    \b
      --nproc-per-node N   processes on this node (--num-gpus and --gpus-per-node mean the same);
                           default: one per GPU, or one
      --nnodes N           number of nodes (--num-nodes means the same)
      --rdzv-endpoint H:P  where several nodes meet
      --max-restarts N     how often to start again after a failure
      -m                   SCRIPT is a module
      --script SCRIPT      the script by name; --backend pytorch-ddp is accepted beside it

    Without --rdzv-endpoint a free port is used, never a fixed one. ARGS go to the script. A script
    that calls drivetrain.load_config() takes --config FILE and any number of path.to.key=value.

    \b
      drivetrain train train.py --nproc-per-node 4 global_batch_size=64 max_steps=500
    """  # noqa: D301 - \b is click's mark for text that must not be wrapped
    from drivetrain.cli.train import run

    raise typer.Exit(run(context.args))


@app.command()
def config(
    words: Annotated[
        list[str] | None, typer.Argument(help="--config FILE and path.to.key=value, to be checked.")
    ] = None,
    file: Annotated[str | None, typer.Option("--config", help="A YAML file to check.")] = None,
) -> None:
    """List every config key with its default, or check a config and show it resolved."""
    from drivetrain.cli.config import run

    run(file, words or [])


Output = Annotated[str | None, typer.Option(help="Folder for results; default: bench-VERB.")]
Rounds = Annotated[int, typer.Option(help="Rounds; each holds a block of every arm.")]
Ranks = Annotated[int, typer.Option(help="Processes.")]


@bench.command()
def overhead(output: Output = None, rounds: Rounds = 120, ranks: Ranks = 2) -> None:
    """What a step costs under Drivetrain, bare torch, Accelerate and Lightning Fabric."""
    from drivetrain.cli.bench import run

    run("overhead", output, rounds, ranks)


@bench.command()
def bitwise(output: Output = None, rounds: Rounds = 60, ranks: Ranks = 2) -> None:
    """What `reproducibility: bitwise` costs, next to the standard mode."""
    from drivetrain.cli.bench import run

    run("bitwise", output, rounds, ranks)


def main() -> None:
    """The console script: errors on purpose are shown as they are, with their exit code."""
    try:
        app()
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)
    except DrivetrainError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_code)

"""Commands that start and manage runs."""

from __future__ import annotations

from typing import Annotated

import typer

from drivetrain.cli.commands import Run, Trust
from drivetrain.cli.reading import reading

verbs = typer.Typer()


@verbs.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,  # after the script, --help is the script's
        "help_option_names": [],  # --help is ours: it also shows the target's flags
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
      --rdzv-endpoint H:P  where several nodes rendezvous
      --plan auto|FILE     plan first and run the best plan; --cluster names the hardware
      --run-dir DIR        the run's directory; the same command resumes from its newest
                           checkpoint, and nodes that share it rendezvous in it
      --accept-change KEY  resume although KEY (seed, data.shuffle, …) has changed since the
                           checkpoint was saved; otherwise that is refused
      --max-restarts N     restarts after failures in training (100)
      --nnodes MIN:MAX     elastic: nodes may join and leave; the global batch stays
      --live               ddp replicas that survive failures without a restart (needs --run-dir)
      -m                   SCRIPT is a module
      --script SCRIPT      the script by name; --backend sets parallel.strategy, or --on ray

    Less often: --spares N (warm spare processes; one per rank), --warm-start (import once, fork the
    ranks), --grace-period S (time to save after SIGTERM; 30), --stall-timeout S (shortest time
    without a step that counts as a stall; 60), --slow-timeout S (the same while starting, saving,
    evaluating or compiling; 900), --max-preemptions N, --max-startup-failures N.

    Without --rdzv-endpoint a free port is used, never a fixed one. ARGS go to the script. A script
    that calls drivetrain.load_config() takes --config FILE and any number of path.to.key=value.
    Exit code 75 means: saved; the same command with the run's --run-dir resumes it.

    --on TARGET submits the run to slurm, ray, kubernetes, hosts (over ssh) or local (here, in the
    background) and returns; then jobs, logs, stop and resume take its directory:

    \b
      --on TARGET          slurm, ray, kubernetes, hosts, local; --hosts FILE means --on hosts
      --nodes N            (--nnodes) and --gpus-per-node N, --time H:MM:SS, --job-name NAME,
                           --env NAME[=VALUE], and the target's own flags
      --on TARGET --help   list the target's own flags
      --dry-run            print what would be submitted
      --wait               follow the run to its end, and exit with its exit code
      --launch-file FILE   a YAML file with any of these flags

    \b
      drivetrain train train.py --nproc-per-node 4 global_batch_size=64 max_steps=500
    """  # noqa: D301 - \b is click's mark for text that must not be wrapped
    from drivetrain.cli.say import hand_on
    from drivetrain.cli.train import help_of_target, run
    from drivetrain.launch.command import HelpAsked

    try:
        code = run(context.args)
    except HelpAsked:
        hand_on(f"{help_of_target(context.args) or context.get_help()}\n")
        code = 0
    raise typer.Exit(code)


@verbs.command()
def jobs(
    folder: Annotated[
        str, typer.Argument(metavar="[RUN]", help="A run's directory, or a directory of runs.")
    ] = "runs",
) -> None:
    """List submitted runs and their state: waiting, running, finished, failed or stopped."""
    from drivetrain.cli.jobs import show

    with reading(folder):
        show(folder)


@verbs.command()
def logs(
    run: Run,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Follow until the run ends.")
    ] = False,
) -> None:
    """Show what a submitted run printed."""
    from drivetrain.cli.jobs import show_logs

    with reading(run):
        show_logs(run, follow=follow)


@verbs.command()
def stop(run: Run, trust: Trust = False) -> None:
    """Ask a submitted run to save and stop."""
    from drivetrain.cli.jobs import stop as stop_run

    stop_run(run, trust=trust)


@verbs.command(name="resume")
def resume_run(run: Run, trust: Trust = False) -> None:
    """Submit a run again with the same settings; it resumes from its newest checkpoint."""
    from drivetrain.cli.jobs import resume as resume_job

    resume_job(run, trust=trust)


@verbs.command()
def config(
    argv: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Overrides to check: path.to.key=value."),
    ] = None,
    file: Annotated[str | None, typer.Option("--config", help="YAML file to check.")] = None,
) -> None:
    """List every config key with its default, or check a config and show it resolved."""
    from drivetrain.cli.config import run

    run(file, argv or [])

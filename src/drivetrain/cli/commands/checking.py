"""Checks of hosts, scripts and runs."""

from __future__ import annotations

from typing import Annotated

import typer

from drivetrain.cli.commands import AsJson, Verbs
from drivetrain.cli.reading import reading

verbs = typer.Typer()


@verbs.command()
def doctor(  # noqa: PLR0913, PLR0917 - each is a flag
    argv: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TRAIN_ARGS",
            help="After --: the arguments of the `drivetrain train` to check.",
        ),
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(help="Launcher to expect: slurm, kubernetes, ray, torchrun."),
    ] = None,
    hosts: Annotated[
        str | None, typer.Option(help="File with one host per line, reached by ssh.")
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(help="Hardware to expect: a cluster.yaml, or p5.48xlarge:8, h100:64."),
    ] = None,
    run_dir: Annotated[str | None, typer.Option(help="Directory the run will write to.")] = None,
    store: Annotated[
        str | None, typer.Option(help="Object store the run will write to, such as s3://bucket.")
    ] = None,
    port: Annotated[
        list[int] | None, typer.Option(help="Port the run will use; repeatable.")
    ] = None,
    meet: Annotated[
        str | None,
        typer.Option(
            help="Shared folder through which the hosts of a job find each other (under srun)."
        ),
    ] = None,
    members: Annotated[
        int | None, typer.Option(min=1, help="Number of hosts; default: from the job.")
    ] = None,
    ssh: Annotated[
        str, typer.Option(help="Command that reaches a host.")
    ] = "ssh -o BatchMode=yes -o ConnectTimeout=10",
    target_grace: Annotated[
        float | None,
        typer.Option(min=0, help="Seconds the scheduler waits from SIGTERM to SIGKILL."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check hosts before a run: versions, devices, network, clocks, limits, storage, time-outs.

    Without --hosts or --meet only this host is checked. Each finding states the problem, the
    evidence and the remedy. Exit code 1 when something would break a run.

    \b
      drivetrain doctor --run-dir runs/gpt
      drivetrain doctor --hosts hosts.txt --run-dir /shared/runs/gpt --port 29400
      srun --ntasks-per-node=1 drivetrain doctor --on slurm --meet /shared/tmp
      drivetrain doctor -- --stall-timeout 900 train.py parallel.timeout_s=600
    """  # noqa: D301
    from drivetrain.cli import doctor as verb

    asked = verb.DoctorRequest(
        argv=tuple(argv or ()),
        on=on,
        hosts=hosts,
        cluster=cluster,
        run_dir=run_dir,
        store=store,
        ports=tuple(port or ()),
        meet=meet,
        members=members,
        ssh=ssh,
        target_grace_s=target_grace,
        as_json=as_json,
    )
    raise typer.Exit(verb.run(asked))


@verbs.command()
def env() -> None:
    """Print versions, devices, network and settings of this host for a bug report, redacted."""
    from drivetrain.cli.doctor import show_env

    raise typer.Exit(show_env())


@verbs.command()
def drill(
    script: Annotated[
        list[str] | None,
        typer.Argument(help="Your script and its arguments; default: a built-in example."),
    ] = None,
    ranks: Annotated[int, typer.Option("--nproc-per-node", min=1, help="Processes.")] = 2,
    faults: Annotated[
        str, typer.Option(help="Kinds of fault, comma-separated.")
    ] = "kill,stop,hang,corrupt_shard,kill_supervisor,preempt",
    at_step: Annotated[int, typer.Option(min=1, help="Step after which the fault strikes.")] = 20,
) -> None:
    """Inject faults into SCRIPT's run and check that it recovers exactly.

    Each fault gets its own run, which must finish without help, with the weights of the undisturbed
    run, every sample used once, the newest checkpoint intact and no process left behind.
    """
    from drivetrain.cli.verify import drill_script

    argv = tuple(script or ("-m", "drivetrain.verify.drills.workload"))
    raise typer.Exit(drill_script(argv, ranks, tuple(faults.split(",")), at_step))


# Certificates for the user's own script.

certificate_verbs = typer.Typer(
    cls=Verbs, help="Certificates for your own script.", no_args_is_help=True
)


@certificate_verbs.command()
def resume(
    script: Annotated[list[str], typer.Argument(help="Your script and its arguments.")],
    steps: Annotated[
        int, typer.Option(min=2, help="Steps of the run; it is killed half-way.")
    ] = 100,
    ranks: Annotated[int, typer.Option("--nproc-per-node", min=1, help="Processes.")] = 2,
    then: Annotated[
        int | None,
        typer.Option("--then-nproc", min=1, help="Processes after the kill; default: as before."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Certify that SCRIPT resumes exactly: N steps = N/2 + SIGKILL + N/2.

    The script must take its config from load_config(), so that max_steps and
    checkpoint.every_steps can be set.
    """
    from drivetrain.cli.verify import verify_resume

    raise typer.Exit(verify_resume(tuple(script), steps, ranks, then or ranks, as_json=as_json))


@certificate_verbs.command()
def parity(
    script: Annotated[list[str], typer.Argument(help="Your script and its arguments.")],
    layouts: Annotated[
        str,
        typer.Option(help="Comma-separated name:ranks or key=value@ranks: ddp:2,fsdp:4,hsdp:2x2"),
    ],
    steps: Annotated[int, typer.Option(min=1, help="Steps of each run.")] = 30,
    as_json: AsJson = False,
) -> None:
    """Certify that SCRIPT trains the same under each layout as on one process.

    Losses and gradient norms are compared step by step; where they diverge, the step and the module
    or parameter are named. The script must take its config from load_config().
    """
    from drivetrain.cli.verify import verify_parity

    raise typer.Exit(verify_parity(tuple(script), layouts, steps, as_json=as_json))


@certificate_verbs.command()
def curve(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Run directories.")],
    expected: Annotated[
        str, typer.Option(help="File written by --write: compare the run with it.")
    ] = "",
    write: Annotated[
        str, typer.Option(help="Write such a file from runs with several seeds.")
    ] = "",
    metric: Annotated[str, typer.Option(help="With --write: name of the metric.")] = "val/loss",
) -> None:
    """Compare a run's curve with those of other seeds; exit code 1 if it is outside their interval.

    At each step of the file the value must lie in the seeds' prediction interval, at a level that
    rejects one in a hundred runs with a new seed.

    \b
      drivetrain verify curve runs/seed-1 runs/seed-2 runs/seed-3 --write curve.json
      drivetrain verify curve runs/new --expected curve.json
    """  # noqa: D301 - \b is click's mark for text that must not be wrapped
    from drivetrain.cli.verify import verify_curve, write_curve

    with reading(runs[0]):
        code = write_curve(runs, metric, write) if write else verify_curve(runs, expected)
    raise typer.Exit(code)

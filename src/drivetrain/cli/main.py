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
checkpoint = typer.Typer(help="List, verify, export and compare checkpoints.", no_args_is_help=True)
app.add_typer(checkpoint, name="checkpoint")


certify = typer.Typer(help="Certificates for your own script.", no_args_is_help=True)
app.add_typer(certify, name="verify")


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
      --run-dir DIR        the run's directory; the same command again goes on from its last
                           checkpoint, and several nodes that share it meet in it
      --max-restarts N     how often to start again after a failure in training (100)
      --nnodes MIN:MAX     elastic: nodes may join and leave; the global batch stays
      --live               ddp replicas that go on without a restart (needs --run-dir)
      -m                   SCRIPT is a module
      --script SCRIPT      the script by name; --backend pytorch-ddp is accepted beside it

    Less often: --spares N (warm processes kept ready; one per rank), --warm-start (import once,
    fork the ranks), --grace-period S (to save in after SIGTERM; 30), --stall-timeout S (without a
    step, at least; 60), --slow-timeout S (starting, saving, evaluating; 900), --max-preemptions N,
    --max-startup-failures N.

    Without --rdzv-endpoint a free port is used, never a fixed one. ARGS go to the script. A script
    that calls drivetrain.load_config() takes --config FILE and any number of path.to.key=value.
    Exit code 75 means: saved, start the same command again to go on.

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


@bench.command()
def axes(output: Output = None, rounds: Rounds = 60, ranks: Ranks = 2) -> None:
    """What a step costs under fsdp, tp and pp, next to the same on bare torch."""
    from drivetrain.cli.bench import run

    run("axes", output, rounds, ranks)


@bench.command()
def sentinel(output: Output = None, rounds: Rounds = 60, ranks: Ranks = 2) -> None:
    """What comparing the copies of the model costs."""
    from drivetrain.cli.bench import run

    run("sentinel", output, rounds, ranks)


Address = Annotated[
    str, typer.Argument(help="A run's directory, a folder of checkpoints, or an address (s3://…).")
]
OneCheckpoint = Annotated[
    str, typer.Argument(help="One checkpoint; of a run or a folder, the newest good one.")
]
AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]


@checkpoint.command()
def ls(address: Address, as_json: AsJson = False) -> None:
    """What there is, newest first, with size and state."""
    from drivetrain.cli import checkpoint as verbs

    raise typer.Exit(verbs.ls(address, as_json=as_json))


@checkpoint.command()
def verify(address: Address, as_json: AsJson = False) -> None:
    """Read every byte. Exit code 1 when a checkpoint is damaged, or none is good."""
    from drivetrain.cli import checkpoint as verbs

    raise typer.Exit(verbs.verify(address, as_json=as_json))


@checkpoint.command()
def export(
    address: OneCheckpoint,
    target: Annotated[str, typer.Argument(help="A new folder (safetensors), or a .pt file.")],
    step: Annotated[int | None, typer.Option(help="Of this step, not the newest.")] = None,
    max_shard_gb: Annotated[float, typer.Option(help="Larger ones make several files.")] = 5.0,
) -> None:
    """The weights for other libraries, under the model's own names."""
    from drivetrain.cli import checkpoint as verbs

    raise typer.Exit(verbs.export(address, target, step, max_shard_gb))


@checkpoint.command()
def diff(here: OneCheckpoint, there: OneCheckpoint, as_json: AsJson = False) -> None:
    """What differs between two checkpoints. Exit code 1 when anything does."""
    from drivetrain.cli import checkpoint as verbs

    raise typer.Exit(verbs.diff(here, there, as_json=as_json))


@bench.command()
def save(output: Output = None, rounds: Rounds = 30, ranks: Ranks = 2) -> None:
    """What an asynchronous checkpoint costs, next to none and to bare DCP's async_save."""
    from drivetrain.cli.bench import run

    run("save", output, rounds, ranks)


@bench.command()
def recovery(
    output: Output = None,
    trials: Annotated[int, typer.Option(help="Kills per arm.")] = 8,
) -> None:
    """Kill -9 trials: torchrun, its work-around, warm spares and live replicas, side by side."""
    from drivetrain.cli.bench import run

    run("recovery", output, trials, 2)


@bench.command()
def supervision(output: Output = None, rounds: Rounds = 12) -> None:
    """What being supervised costs when nothing goes wrong, next to torchrun."""
    from drivetrain.cli.bench import run

    run("supervision", output, rounds, 2)


@bench.command()
def scale(output: Output = None) -> None:
    """The control plane with 10,000 simulated ranks: CPU, memory, detection delay."""
    from drivetrain.cli.bench import run

    run("scale", output, 1, 1)


@bench.command(name="slow-link")
def slow_link(output: Output = None) -> None:
    """Time to the same loss over slow links: tuned ddp, compressors, local SGD and DiLoCo."""
    from drivetrain.cli.bench import run

    run("slow-link", output, 1, 2)


@app.command()
def drill(
    script: Annotated[
        list[str] | None, typer.Argument(help="Your script and its words; none: the built-in one.")
    ] = None,
    ranks: Annotated[int, typer.Option("--nproc-per-node", help="Processes.")] = 2,
    faults: Annotated[
        str, typer.Option(help="Kinds of fault, with commas.")
    ] = "kill,stop,hang,corrupt_shard,kill_supervisor,preempt",
    at_step: Annotated[int, typer.Option(help="Break the run after this step.")] = 20,
    campaign: Annotated[
        int, typer.Option(help="Instead: so many random drills on the built-in workload.")
    ] = 0,
    first: Annotated[int, typer.Option(help="Number of the campaign's first drill.")] = 0,
    output: Annotated[str, typer.Option(help="Folder for a campaign's results.")] = "drills",
) -> None:
    """Break SCRIPT's run on purpose, and see that it ends as if nothing had happened.

    Each fault is a run of its own: it must finish alone, with the weights of the undisturbed run,
    every sample used once, the newest checkpoint whole and no process left behind.
    """
    from drivetrain.cli.drill import run_campaign_verb, run_script_verb

    if campaign:
        raise typer.Exit(run_campaign_verb(range(first, first + campaign), output))
    words = tuple(script or ("-m", "drivetrain.testing.faults.workload"))
    raise typer.Exit(run_script_verb(words, ranks, tuple(faults.split(",")), at_step))


@certify.command()
def resume(
    script: Annotated[list[str], typer.Argument(help="Your script and its words.")],
    steps: Annotated[
        int, typer.Option(help="Steps of the whole run; it is killed half-way.")
    ] = 100,
    ranks: Annotated[int, typer.Option("--nproc-per-node", help="Processes.")] = 2,
    then: Annotated[
        int | None, typer.Option("--then-nproc", help="Processes after the kill; the same if left.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Certify that SCRIPT resumes exactly: N steps = N/2 + SIGKILL + N/2.

    The script must take its config from load_config(), so that max_steps and
    checkpoint.every_steps can be set.
    """
    from drivetrain.cli.verify import run

    raise typer.Exit(run(tuple(script), steps, ranks, then or ranks, as_json=as_json))


@certify.command()
def parity(
    script: Annotated[list[str], typer.Argument(help="Your script and its words.")],
    layouts: Annotated[
        str,
        typer.Option(help="name:ranks or key=value@ranks, with commas: ddp:2,fsdp:4,hsdp:2x2 …"),
    ],
    steps: Annotated[int, typer.Option(help="Steps of each run.")] = 30,
    as_json: AsJson = False,
) -> None:
    """Certify that SCRIPT trains under each layout what it trains on one process.

    Losses and gradient norms are compared step by step; where they part, the step, the module or
    parameter and what was going on are named. The script must take its config from load_config().
    """
    from drivetrain.cli.verify import run_parity

    raise typer.Exit(run_parity(tuple(script), layouts, steps, as_json=as_json))


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    options_metavar="[FLAGS]",
)
def rehearse(
    script: Annotated[list[str], typer.Argument(help="Your script and its words.")],
    world_size: Annotated[int, typer.Option(help="Ranks of the run to rehearse.")],
    ranks: Annotated[
        str, typer.Option(help="Which are rehearsed: sample, all-kinds, or how many.")
    ] = "sample",
    device_memory: Annotated[
        str | None, typer.Option(help="Of one device, such as 80G: what does not fit is found.")
    ] = None,
    devices_per_node: Annotated[int, typer.Option(help="Ranks that share a node.")] = 8,
    as_json: AsJson = False,
) -> None:
    """Run SCRIPT at any world size on this machine: two steps, with tensors that are not there.

    The real script, the real sharding and the real collective calls, as the first rank, every
    pipeline stage and the edges of each axis. Shapes that do not divide, missing gradients, memory
    that is not there and ranks that do not do the same are found, with the line. Exit code 1 when
    anything is.

    \b
      drivetrain rehearse train.py --world-size 4096 parallel.strategy=fsdp parallel.tp=8
    """  # noqa: D301 - \b is click's mark for text that must not be wrapped
    from drivetrain.cli.rehearse import run

    words = tuple(script)
    raise typer.Exit(
        run(words, world_size, ranks, device_memory, devices_per_node, as_json=as_json)
    )


@app.command()
def simulate(  # noqa: PLR0913, PLR0917 - a command's flags are its arguments
    nodes: Annotated[int, typer.Option(help="Nodes that train.")] = 0,
    mtbf: Annotated[str, typer.Option(help="Between two failures of one node: 240d, 5700h.")] = "",
    days: Annotated[float, typer.Option(help="Length of the run.")] = 30.0,
    policy: Annotated[
        str, typer.Option(help="restart everything, go on elastic, or with live replicas.")
    ] = "restart",
    step_time: Annotated[str, typer.Option(help="One step.")] = "10s",
    checkpoint_interval: Annotated[str, typer.Option(help="A time, or auto.")] = "auto",
    save_cost: Annotated[str, typer.Option(help="For which a save holds up the run.")] = "30s",
    detect: Annotated[str, typer.Option(help="Until a failure is noticed.")] = "60s",
    restart: Annotated[str, typer.Option(help="From then to the next step.")] = "5m",
    hardware: Annotated[float, typer.Option(help="Part of failures that cost a node.")] = 0.8,
    repair: Annotated[str, typer.Option(help="Until a node is back.")] = "1d",
    spares: Annotated[int, typer.Option(help="Nodes kept ready.")] = 0,
    replicas: Annotated[int, typer.Option(help="Copies of the model (live).")] = 1,
    stall: Annotated[str, typer.Option(help="Of the other replicas (live).")] = "30s",
    correlated: Annotated[
        str, typer.Option(help="Several nodes at once: times a day x nodes, such as 0.1x16.")
    ] = "",
    stragglers: Annotated[
        str, typer.Option(help="Slow nodes: mtbf x slowdown x until found: 1000d x 1.3 x 2h.")
    ] = "",
    price: Annotated[float | None, typer.Option(help="Of a device for an hour.")] = None,
    devices_per_node: Annotated[int, typer.Option(help="Devices of a node.")] = 8,
    replications: Annotated[int, typer.Option(help="Runs to simulate.")] = 200,
    seed: Annotated[int, typer.Option(help="Of the random streams.")] = 0,
    what_if: Annotated[
        str, typer.Option(help="Change one input: spares=0,8,32 or restart=1m,5m,15m.")
    ] = "",
    plot: Annotated[str, typer.Option(help="Write a picture here (png).")] = "",
    published: Annotated[
        str, typer.Option(help="Instead: the back-tests and the curve by size, into this folder.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """How much of a long run is useful, with failures, restarts, saves and stragglers.

    Times are written 30s, 10m, 2.5h, 54d. All inputs are shown with the result.

    \b
      drivetrain simulate --nodes 2048 --mtbf 237d --days 54 --spares 16 --price 2.5
    """  # noqa: D301 - \b is click's mark for text that must not be wrapped
    words = dict(locals())  # every flag, by its name
    from drivetrain.cli import simulate as verb

    if published:
        raise typer.Exit(verb.run_published(published))
    raise typer.Exit(verb.run(words, what_if, plot, as_json=as_json))


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

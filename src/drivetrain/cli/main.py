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
      --plan auto|FILE     plan first and run the best plan; --cluster says what for
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

    --on TARGET hands the run to slurm, ray, hosts (over ssh) or local (this machine, in the
    background) and returns; then jobs, logs, stop and resume take its directory:

    \b
      --on TARGET          slurm, ray, hosts, local; --hosts FILE alone means --on hosts
      --nodes N            (--nnodes) and --gpus-per-node N, --time H:MM:SS, --job-name NAME,
                           --env NAME[=VALUE], and what the target itself takes
      --dry-run            print what would be submitted
      --wait               follow the run to its end, and exit with its code
      --launch-file FILE   a YAML file with any of these flags

    \b
      drivetrain train train.py --nproc-per-node 4 global_batch_size=64 max_steps=500
    """  # noqa: D301 - \b is click's mark for text that must not be wrapped
    from drivetrain.cli.train import run

    raise typer.Exit(run(context.args))


Run = Annotated[str, typer.Argument(metavar="RUN", help="The run's directory.")]


@app.command()
def jobs(
    folder: Annotated[
        str, typer.Argument(metavar="[RUN]", help="A run's directory, or one of many runs.")
    ] = "runs",
) -> None:
    """Say where submitted runs are: waiting, running, finished, failed or stopped."""
    from drivetrain.cli.jobs import show

    show(folder)


@app.command()
def logs(
    run: Run,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Until the run is over.")] = False,
) -> None:
    """Show what a submitted run printed."""
    from drivetrain.cli.jobs import show_logs

    show_logs(run, follow=follow)


@app.command()
def stop(run: Run) -> None:
    """Ask a submitted run to save and end."""
    from drivetrain.cli.jobs import stop as stop_run

    stop_run(run)


@app.command(name="resume")
def resume_run(run: Run) -> None:
    """Submit a run again, as it was: it goes on from its last checkpoint."""
    from drivetrain.cli.jobs import resume as resume_job

    resume_job(run)


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


RunAddress = Annotated[
    str, typer.Argument(metavar="RUN", help="A run's directory, or its address (s3://…).")
]


@app.command()
def status(
    run: RunAddress, as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False
) -> None:
    """Where RUN stands: step, loss, throughput, goodput, cost, and where every second went."""
    from drivetrain.cli import status as verbs

    raise typer.Exit(verbs.status(run, as_json=as_json))


@app.command()
def runs(
    folder: Annotated[str, typer.Argument(metavar="[DIR]", help="Where runs lie.")] = "runs",
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """List the runs under DIR (default: runs), the one last heard of first."""
    from drivetrain.cli import status as verbs

    raise typer.Exit(verbs.runs(folder, as_json=as_json))


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


@bench.command()
def recording(output: Output = None, rounds: Rounds = 40, ranks: Ranks = 2) -> None:
    """What the recorder and all sinks cost a step."""
    from drivetrain.cli.bench import run

    run("recording", output, rounds, ranks)


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
def start(output: Output = None, rounds: Rounds = 20, ranks: Ranks = 2) -> None:
    """From the command to the script's first line, next to torchrun."""
    from drivetrain.cli.bench import run

    run("start", output, rounds, ranks)


@bench.command()
def scale(output: Output = None) -> None:
    """The control plane with 10,000 simulated ranks: CPU, memory, detection delay."""
    from drivetrain.cli.bench import run

    run("scale", output, 1, 1)


@bench.command()
def reading(output: Output = None) -> None:
    """Seconds and memory to look at runs of up to 4,096 ranks × 10,000 steps."""
    from drivetrain.cli.bench import run

    run("reading", output, 1, 1)


@bench.command(name="ray")
def bench_ray(output: Output = None, rounds: Rounds = 8) -> None:
    """Start-up and step time on Ray, next to Ray Train bare and our own launcher."""
    from drivetrain.cli.bench import run

    run("ray", output, rounds, 2)


@bench.command(name="plan-time")
def bench_plan_time(output: Output = None) -> None:
    """Predicted step times next to measured ones, on links of three speeds (needs root)."""
    from drivetrain.cli.bench import run

    run("plan-time", output, 1, 2)


@bench.command(name="slow-link")
def slow_link(output: Output = None) -> None:
    """Time to the same loss over slow links: tuned ddp, compressors, local SGD and DiLoCo."""
    from drivetrain.cli.bench import run

    run("slow-link", output, 1, 2)


@app.command()
def plan(  # noqa: PLR0913, PLR0917 - a verb's options
    model: Annotated[
        str,
        typer.Argument(
            help="Your script, a public model (llama-3-70b, gpt2-xl …), a config.json, or "
            "module:function that returns a Subject."
        ),
    ],
    words: Annotated[list[str] | None, typer.Argument(help="The script's own words.")] = None,
    cluster: Annotated[
        str, typer.Option(help="A cluster.yaml, or a name and a count: h100:64, p5.48xlarge:8.")
    ] = "cluster.yaml",
    objective: Annotated[str, typer.Option(help="fastest, cheapest or fewest.")] = "fastest",
    global_batch_size: Annotated[
        int | None, typer.Option(help="Samples a step; default: the script's, or 2 per device.")
    ] = None,
    sequence_length: Annotated[
        int | None, typer.Option(help="Tokens a sample; default: the model's longest.")
    ] = None,
    precision: Annotated[
        str | None, typer.Option(help="fp32, bf16, fp16 or any; default: the script's, or bf16.")
    ] = None,
    strategies: Annotated[str, typer.Option(help="What may be used.")] = "ddp,fsdp,deepspeed",
    steps: Annotated[int | None, typer.Option(help="Length of the run.")] = None,
    deadline_h: Annotated[float | None, typer.Option("--deadline", help="In hours.")] = None,
    budget: Annotated[float | None, typer.Option(help="In the cluster's money.")] = None,
    top: Annotated[int, typer.Option(help="Plans to show.")] = 8,
    as_json: AsJson = False,
    picture: Annotated[str | None, typer.Option("--plot", help="A PNG of the best plans.")] = None,
    output: Annotated[str | None, typer.Option(help="Where to write plan.json.")] = None,
) -> None:
    """Say what fits, how fast and for how much, before a device is rented.

    The model is traced on fake tensors and never made. Exit code 1 when nothing fits.
    """
    from drivetrain.cli.plan import Asked, run

    asked = Asked(
        model,
        tuple(words or ()),
        cluster,
        objective,
        global_batch_size,
        sequence_length,
        precision,
        strategies,
        steps,
        deadline_h,
        budget,
        top,
    )
    raise typer.Exit(run(asked, as_json=as_json, picture=picture, output=output))


@app.command()
def probe(
    ranks: Annotated[int, typer.Option("--nproc-per-node", help="Ranks on this node.")] = 1,
    nodes: Annotated[int, typer.Option("--nnodes", help="Nodes; run it on each.")] = 1,
    output: Annotated[str, typer.Option(help="The file to write.")] = "cluster.yaml",
) -> None:
    """Measure this machine as `plan` needs to know it, and write cluster.yaml.

    Products by precision and size, memory, collectives by size, storage; half a minute. On several
    ranks at once, as they will train.
    """
    from drivetrain.cli.plan import probe as run

    raise typer.Exit(run(ranks, nodes, output))


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


@app.command()
def diagnose(
    run_dir: Annotated[str, typer.Argument(metavar="RUN", help="A run's directory or address.")],
    as_json: AsJson = False,
) -> None:
    """What went wrong in RUN, or is slow: rank, host, line and remedy. Exit code 1 on an error.

    Reads the run's directory and nothing else: the run may be over, under way, or on another
    machine whose storage is mounted here.
    """
    from drivetrain.cli.diagnose import run

    raise typer.Exit(run(run_dir, as_json=as_json))


@app.command(
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
    steps: Annotated[str, typer.Option(help="FIRST:LAST, counted from 1.")] = "5:10",
    output: Annotated[str, typer.Option("--output", "-o", help="Folder.")] = "profile",
    py_spy: Annotated[
        bool, typer.Option("--py-spy", help="A flame graph of the Python code as well.")
    ] = False,
    nsys: Annotated[
        bool, typer.Option("--nsys", help="Only print the command for Nsight Systems.")
    ] = False,
) -> None:
    """Run SCRIPT with torch's profiler on chosen ranks and steps, and say where time went.

    drivetrain profile [OPTIONS] [FLAGS] SCRIPT [ARGS]: flags and arguments are those of
    `drivetrain train`. The traces open in Perfetto and in TensorBoard.
    """
    from drivetrain.cli.profile import Choice, run

    raise typer.Exit(run(context.args, Choice(ranks, steps, output, py_spy, nsys)))


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


@app.command()
def watch(
    run: RunAddress,
    every_s: Annotated[float, typer.Option("--every", min=0.1, help="Seconds between looks.")] = 2,
    once: Annotated[bool, typer.Option("--once", help="Print one frame; for pipes.")] = False,
) -> None:
    """See a run as it goes: curves, ranks, where the time goes, last events. q quits.

    Works on a run that goes on, that is over, or that lies elsewhere; each look reads only what is
    new.
    """
    from drivetrain.cli import view

    raise typer.Exit(view.watch(run, every_s, once=once))


@app.command()
def report(
    run: RunAddress,
    output: Annotated[str, typer.Option("--output", "-o", help="The file.")] = "report.html",
) -> None:
    """Write one page about a run: verdict, curves, where the time went, ranks, attempts, config.

    The page needs nothing but itself: no network, no script.
    """
    from drivetrain.cli import view

    raise typer.Exit(view.report(run, output))


@app.command()
def compare(
    run: RunAddress,
    other: Annotated[str, typer.Argument(metavar="RUN", help="The one beside it.")],
    output: Annotated[
        str | None, typer.Option("--output", "-o", help="A page, too: curves over each other.")
    ] = None,
) -> None:
    """Two runs side by side: what was asked differently, and what came of it."""
    from drivetrain.cli import view

    raise typer.Exit(view.compare(run, other, output))


@app.command()
def doctor(  # noqa: PLR0913, PLR0917 - one for each thing that can be asked
    words: Annotated[
        list[str] | None,
        typer.Argument(help="After --: the words of the `drivetrain train` that is planned."),
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(help="Whose variables to expect: slurm, kubernetes, ray, torchrun."),
    ] = None,
    hosts: Annotated[str | None, typer.Option(help="File with one host per line, by ssh.")] = None,
    cluster: Annotated[str | None, typer.Option(help="Cluster file: what to expect.")] = None,
    run_dir: Annotated[str | None, typer.Option(help="Where the run will write.")] = None,
    store: Annotated[str | None, typer.Option(help="Its object store, for example s3://…")] = None,
    port: Annotated[list[int] | None, typer.Option(help="A port it will use; repeatable.")] = None,
    meet: Annotated[
        str | None, typer.Option(help="A shared folder where all hosts of a job meet, under srun.")
    ] = None,
    members: Annotated[int | None, typer.Option(help="How many meet; as the job says.")] = None,
    ssh: Annotated[
        str, typer.Option(help="How a host is reached.")
    ] = "ssh -o BatchMode=yes -o ConnectTimeout=10",
    target_grace: Annotated[
        float | None, typer.Option(help="Seconds the scheduler waits from SIGTERM to SIGKILL.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Is this place fit for a run? Versions, devices, network, clocks, limits, storage, time-outs.

    Without --hosts or --meet only this host is examined. Each finding says what is wrong, how it
    was seen and what to do. Exit code 1 when something would break a run.

    \b
      drivetrain doctor --run-dir runs/gpt
      drivetrain doctor --hosts hosts.txt --run-dir /shared/runs/gpt --port 29400
      srun --ntasks-per-node=1 drivetrain doctor --on slurm --meet /shared/tmp
      drivetrain doctor -- --stall-timeout 900 train.py parallel.timeout_s=600
    """  # noqa: D301
    from drivetrain.cli import doctor as verb

    asked = verb.Asked(
        words=tuple(words or ()),
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


@app.command()
def env() -> None:
    """Versions, devices, network and settings of this host, to paste; secrets are taken out."""
    from drivetrain.cli.doctor import show_env

    raise typer.Exit(show_env())


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

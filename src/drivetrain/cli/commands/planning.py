"""Commands for planning before you pay for devices."""

from __future__ import annotations

from typing import Annotated

import typer

from drivetrain.cli.commands import AsJson

verbs = typer.Typer()


@verbs.command()
def plan(  # noqa: PLR0913, PLR0917 - each is a flag
    model: Annotated[
        str,
        typer.Argument(
            help="Your script, a public model (llama-3-70b, gpt2-xl …), a config.json, or "
            "module:function that describes a step (docs/planning.md)."
        ),
    ],
    argv: Annotated[
        list[str] | None,
        typer.Argument(metavar="SCRIPT_ARGS", help="Arguments of the script."),
    ] = None,
    cluster: Annotated[
        str, typer.Option(help="A cluster.yaml, or a name and a count: h100:64, p5.48xlarge:8.")
    ] = "cluster.yaml",
    objective: Annotated[
        str, typer.Option(help="What to optimize: fastest, cheapest or fewest devices.")
    ] = "fastest",
    global_batch_size: Annotated[
        int | None,
        typer.Option(min=1, help="Samples per step; default: the script's, or 2 per device."),
    ] = None,
    sequence_length: Annotated[
        int | None, typer.Option(min=1, help="Tokens per sample; default: the model's maximum.")
    ] = None,
    precision: Annotated[
        str | None, typer.Option(help="fp32, bf16, fp16 or any; default: the script's, or bf16.")
    ] = None,
    strategies: Annotated[
        str,
        typer.Option(
            help="Strategies to consider, comma-separated.",
            show_default="all with a tested cost model",
        ),
    ] = "",
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of the run.")] = None,
    deadline_h: Annotated[
        float | None, typer.Option("--deadline", min=0, help="Hours the run may take.")
    ] = None,
    budget: Annotated[
        float | None, typer.Option(min=0, help="Maximum cost, in the cluster's currency.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Number of plans to show.")] = 8,
    as_json: AsJson = False,
    picture: Annotated[
        str | None, typer.Option("--plot", help="Write a PNG plot of the best plans.")
    ] = None,
    output: Annotated[str | None, typer.Option(help="Where to write plan.json.")] = None,
) -> None:
    """Predict what fits, how fast it trains and what it costs, before you rent a device.

    The model is traced on fake tensors and never allocated. Exit code 1 when nothing fits.
    """
    from drivetrain.cli.planning import PlanRequest, run_plan

    asked = PlanRequest(
        model,
        tuple(argv or ()),
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
    raise typer.Exit(run_plan(asked, as_json=as_json, picture=picture, output=output))


@verbs.command()
def probe(
    ranks: Annotated[int, typer.Option("--nproc-per-node", min=1, help="Ranks on this node.")] = 1,
    nodes: Annotated[
        int, typer.Option("--nnodes", min=1, help="Number of nodes; run the command on each.")
    ] = 1,
    output: Annotated[str, typer.Option(help="File to write.")] = "cluster.yaml",
) -> None:
    """Measure this machine for `plan` and write cluster.yaml.

    Matrix products by precision and size, memory, collectives by size, storage; takes half a
    minute. With several ranks, all measure at once, as they will train.
    """
    from drivetrain.cli.planning import run_probe

    raise typer.Exit(run_probe(ranks, nodes, output))


@verbs.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    options_metavar="[FLAGS]",
)
def rehearse(
    script: Annotated[list[str], typer.Argument(help="Your script and its arguments.")],
    world_size: Annotated[int, typer.Option(help="World size to rehearse.")],
    ranks: Annotated[
        str, typer.Option(help="Ranks to rehearse: sample, all-kinds, or a number.")
    ] = "sample",
    device_memory: Annotated[
        str | None,
        typer.Option(help="Memory of one device, such as 80G; ranks that need more are reported."),
    ] = None,
    devices_per_node: Annotated[int, typer.Option(min=1, help="Ranks per node.")] = 8,
    as_json: AsJson = False,
) -> None:
    """Run two steps of SCRIPT at any world size on this machine, with fake tensors.

    The real script, the real sharding and the real collective calls, as the first rank, every
    pipeline stage and the edges of each axis. Reports, with the line: shapes that do not divide,
    missing gradients, too little memory, ranks whose collectives differ. Exit code 1 when anything
    is found. The script must train with Trainer: one with its own loop (prepare) is refused.

    \b
      drivetrain rehearse train.py --world-size 4096 parallel.strategy=fsdp parallel.tp=8
    """  # noqa: D301 - \b is click's mark for text that must not be wrapped
    from drivetrain.cli.planning import run_rehearsal

    argv = tuple(script)
    raise typer.Exit(
        run_rehearsal(argv, world_size, ranks, device_memory, devices_per_node, as_json=as_json)
    )


@verbs.command()
def simulate(  # noqa: PLR0913, PLR0917 - each is a flag
    nodes: Annotated[int, typer.Option(help="Number of nodes that train.")] = 0,
    mtbf: Annotated[
        str, typer.Option(help="Mean time between failures of one node: 240d, 5700h.")
    ] = "",
    days: Annotated[float, typer.Option(help="Days of the run.")] = 30.0,
    policy: Annotated[
        str, typer.Option(help="After a failure: restart, elastic or live.")
    ] = "restart",
    step_time: Annotated[str, typer.Option(help="Duration of a step.")] = "10s",
    checkpoint_interval: Annotated[
        str, typer.Option(help="Time between checkpoints, or auto.")
    ] = "auto",
    save_cost: Annotated[str, typer.Option(help="Time a checkpoint blocks training.")] = "30s",
    detect: Annotated[str, typer.Option(help="Time to detect a failure.")] = "60s",
    restart: Annotated[str, typer.Option(help="Time from detection to the next step.")] = "5m",
    hardware: Annotated[
        float, typer.Option(help="Fraction of failures that take a node out of service.")
    ] = 0.8,
    repair: Annotated[str, typer.Option(help="Time until a failed node is back.")] = "1d",
    spares: Annotated[int, typer.Option(help="Number of spare nodes.")] = 0,
    replicas: Annotated[int, typer.Option(help="Number of model replicas (live).")] = 1,
    stall: Annotated[
        str, typer.Option(help="Time the other replicas pause after a failure (live).")
    ] = "30s",
    correlated: Annotated[
        str, typer.Option(help="Correlated failures: times per day x nodes, such as 0.1x16.")
    ] = "",
    stragglers: Annotated[
        str, typer.Option(help="Stragglers: mtbf x slowdown x time to detect: 1000d x 1.3 x 2h.")
    ] = "",
    price: Annotated[float | None, typer.Option(help="Price of one device per hour.")] = None,
    devices_per_node: Annotated[int, typer.Option(help="Devices per node.")] = 8,
    replications: Annotated[int, typer.Option(help="Number of simulated runs.")] = 200,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    what_if: Annotated[
        str, typer.Option(help="Vary one input: spares=0,8,32 or restart=1m,5m,15m.")
    ] = "",
    plot: Annotated[str, typer.Option(help="Write a PNG plot.")] = "",
    published: Annotated[
        str, typer.Option(help="Instead: write the back-tests and goodput by size to this folder.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Simulate goodput and cost of a long run with failures, restarts, checkpoints and stragglers.

    Times are written 30s, 10m, 2.5h, 54d. All inputs are shown with the result.

    \b
      drivetrain simulate --nodes 2048 --mtbf 237d --days 54 --spares 16 --price 2.5
    """  # noqa: D301 - \b is click's mark for text that must not be wrapped
    flags = dict(locals())  # every flag by name
    from drivetrain.cli import planning as verb

    if published:
        raise typer.Exit(verb.run_published(published))
    raise typer.Exit(verb.run_simulation(flags, what_if, plot, as_json=as_json))

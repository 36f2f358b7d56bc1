"""Before devices are paid for."""

from __future__ import annotations

from typing import Annotated

import typer

from drivetrain.cli.commands.options import AsJson

verbs = typer.Typer()


@verbs.command()
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
    strategies: Annotated[
        str, typer.Option(help="What may be used, with commas.", show_default="those it knows well")
    ] = "",
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


@verbs.command()
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


@verbs.command(
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


@verbs.command()
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

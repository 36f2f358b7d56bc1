"""`drivetrain bench`: collectives and scaling."""

from __future__ import annotations

from typing import Annotated

import typer

from drivetrain.cli.commands import Verbs

verbs = typer.Typer(
    cls=Verbs, help="Measure collectives and scaling on your own ranks.", no_args_is_help=True
)


@verbs.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    options_metavar="[FLAGS]",
)
def collectives(  # noqa: PLR0913, PLR0917 - each is a flag
    context: typer.Context,
    operations: Annotated[
        str, typer.Option("--ops", help="Names with commas, such as all_reduce,all_gather.")
    ] = "all",
    min_bytes: Annotated[str, typer.Option(help="Smallest size; 8, 4K or 1MB (× 1024).")] = "8",
    max_bytes: Annotated[str, typer.Option(help="Largest size.")] = "64MB",
    factor: Annotated[int, typer.Option(help="Factor from one size to the next.")] = 4,
    dtype: Annotated[
        str, typer.Option(help="int8, uint8, int32, int64, half, float, double or bfloat16.")
    ] = "float",
    redop: Annotated[str, typer.Option(help="sum, min or max.")] = "sum",
    axes: Annotated[
        str, typer.Option(help="Also measure each axis of this layout: tp=2,dp_shard=-1.")
    ] = "",
    calls: Annotated[
        int | None,
        typer.Option(
            "--iters", help="Timed calls per row; default: a quarter second of them, 5 to 200."
        ),
    ] = None,
    comm_backend: Annotated[
        str | None, typer.Option(help="gloo, nccl, mpi …; default: the device's backend.")
    ] = None,
    line_rate: Annotated[
        str | None,
        typer.Option(
            help="Line rate of a node's network, such as 10Gbit; adds a column with its percentage."
        ),
    ] = None,
    json_file: Annotated[str | None, typer.Option("--json", help="File to write.")] = None,
    plot_file: Annotated[str | None, typer.Option("--plot", help="Plot file to write.")] = None,
    cluster_file: Annotated[
        str | None,
        typer.Option(
            "--cluster", help="Cluster file whose links are replaced by the measured ones."
        ),
    ] = None,
) -> None:
    """Time and check each collective of torch.distributed, in nccl-tests' columns.

    Other flags are those of `drivetrain train` that start ranks: --nproc-per-node, --nnodes, --on …
    Every size is checked element by element, with exact integers; exit code 1 if one is wrong.
    """
    from drivetrain.cli.bench import TypedCollectives, run_collectives

    typed = TypedCollectives(
        operations,
        min_bytes,
        max_bytes,
        factor,
        dtype,
        redop,
        axes,
        calls,
        comm_backend,
        line_rate,
        json_file,
        plot_file,
        cluster_file,
    )
    raise typer.Exit(run_collectives(typed, context.args))


@verbs.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    options_metavar="[FLAGS]",
)
def scaling(  # noqa: PLR0913, PLR0917 - each is a flag
    context: typer.Context,
    strategies: Annotated[
        str, typer.Option(help="Drivetrain's strategies, each next to its bare engine: ddp, fsdp.")
    ] = "ddp,fsdp",
    beside: Annotated[
        str,
        typer.Option(
            help="Libraries to compare with: horovod, ray or none; default: those installed."
        ),
    ] = "installed",
    mode: Annotated[str, typer.Option(help="weak, strong or both.")] = "both",
    sizes: Annotated[
        str, typer.Option(help="Numbers of ranks, such as 1,2,4; default: powers of two, and all.")
    ] = "",
    batch_size: Annotated[
        int | None,
        typer.Option(help="Samples per step: per rank (weak), or in total (strong)."),
    ] = None,
    emulate_compute: Annotated[
        float | None,
        typer.Option(
            metavar="MS",
            help="Wait this long per --batch-size samples instead of computing: for many ranks on "
            "few cores. This measures synchronization, not devices.",
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps per block; Drivetrain logs once in each.")] = 10,
    rounds: Annotated[int, typer.Option(help="Blocks of each arm per pass.")] = 10,
    passes: Annotated[
        int, typer.Option(help="Passes through the sizes, alternately up and down.")
    ] = 2,
    width: Annotated[int, typer.Option(help="Width of the decoder that is trained.")] = 64,
    layers: Annotated[int, typer.Option(help="Layers of the decoder.")] = 4,
    sequence_length: Annotated[int, typer.Option(help="Tokens per sample.")] = 32,
    json_file: Annotated[str | None, typer.Option("--json", help="File to write.")] = None,
    plot_file: Annotated[str | None, typer.Option("--plot", help="Plot file to write.")] = None,
) -> None:
    """Measure weak and strong scaling next to bare DDP, FSDP2, Horovod and Ray Train.

    Other flags are those of `drivetrain train` that start ranks: --nproc-per-node, --nnodes, --on …
    All arms take turns on the same ranks. Every arm's losses are compared with those of one
    process on the same samples; exit code 1 if they differ.
    """
    from drivetrain.cli.bench import TypedScaling, run_scaling

    typed = TypedScaling(
        strategies,
        beside,
        mode,
        sizes,
        batch_size,
        emulate_compute,
        steps,
        rounds,
        passes,
        width,
        layers,
        sequence_length,
        json_file,
        plot_file,
    )
    raise typer.Exit(run_scaling(typed, context.args))

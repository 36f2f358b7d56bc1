"""Every benchmark there is."""

from __future__ import annotations

from typing import Annotated

import typer

from drivetrain.cli.commands.options import Output, Ranks, Rounds

verbs = typer.Typer(help="Measure, always next to the bare engine.", no_args_is_help=True)


@verbs.command()
def overhead(output: Output = None, rounds: Rounds = 120, ranks: Ranks = 2) -> None:
    """What a step costs under Drivetrain, bare torch, Accelerate and Lightning Fabric."""
    from drivetrain.cli.bench import run

    run("overhead", output, rounds, ranks)


@verbs.command()
def bitwise(output: Output = None, rounds: Rounds = 60, ranks: Ranks = 2) -> None:
    """What `reproducibility: bitwise` costs, next to the standard mode."""
    from drivetrain.cli.bench import run

    run("bitwise", output, rounds, ranks)


@verbs.command()
def axes(output: Output = None, rounds: Rounds = 60, ranks: Ranks = 2) -> None:
    """What a step costs under fsdp, tp and pp, next to the same on bare torch."""
    from drivetrain.cli.bench import run

    run("axes", output, rounds, ranks)


@verbs.command()
def sentinel(output: Output = None, rounds: Rounds = 60, ranks: Ranks = 2) -> None:
    """What comparing the copies of the model costs."""
    from drivetrain.cli.bench import run

    run("sentinel", output, rounds, ranks)


@verbs.command()
def recording(output: Output = None, rounds: Rounds = 40, ranks: Ranks = 2) -> None:
    """What the recorder and all sinks cost a step."""
    from drivetrain.cli.bench import run

    run("recording", output, rounds, ranks)


@verbs.command()
def save(output: Output = None, rounds: Rounds = 30, ranks: Ranks = 2) -> None:
    """What an asynchronous checkpoint costs, next to none and to bare DCP's async_save."""
    from drivetrain.cli.bench import run

    run("save", output, rounds, ranks)


@verbs.command()
def recovery(
    output: Output = None,
    trials: Annotated[int, typer.Option(help="Kills per arm.")] = 8,
) -> None:
    """Kill -9 trials: torchrun, its work-around, warm spares and live replicas, side by side."""
    from drivetrain.cli.bench import run

    run("recovery", output, trials, 2)


@verbs.command()
def supervision(output: Output = None, rounds: Rounds = 12) -> None:
    """What being supervised costs when nothing goes wrong, next to torchrun."""
    from drivetrain.cli.bench import run

    run("supervision", output, rounds, 2)


@verbs.command()
def start(output: Output = None, rounds: Rounds = 20, ranks: Ranks = 2) -> None:
    """From the command to the script's first line, next to torchrun."""
    from drivetrain.cli.bench import run

    run("start", output, rounds, ranks)


@verbs.command()
def scale(output: Output = None) -> None:
    """The control plane with 10,000 simulated ranks: CPU, memory, detection delay."""
    from drivetrain.cli.bench import run

    run("scale", output, 1, 1)


@verbs.command()
def reading(output: Output = None) -> None:
    """Seconds and memory to look at runs of up to 4,096 ranks × 10,000 steps."""
    from drivetrain.cli.bench import run

    run("reading", output, 1, 1)


@verbs.command(name="ray")
def bench_ray(output: Output = None, rounds: Rounds = 8) -> None:
    """Start-up and step time on Ray, next to Ray Train bare and our own launcher."""
    from drivetrain.cli.bench import run

    run("ray", output, rounds, 2)


@verbs.command(name="plan-time")
def plan_time(output: Output = None) -> None:
    """Predicted step times next to measured ones, on links of three speeds (needs root)."""
    from drivetrain.cli.bench import run

    run("plan-time", output, 1, 2)


@verbs.command(name="slow-link")
def slow_link(output: Output = None) -> None:
    """Time to the same loss over slow links: tuned ddp, compressors, local SGD and DiLoCo."""
    from drivetrain.cli.bench import run

    run("slow-link", output, 1, 2)

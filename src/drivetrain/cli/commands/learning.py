"""`drivetrain learn`: learn distributed training by writing it."""

from __future__ import annotations

from typing import Annotated

import typer

from drivetrain.cli.commands import Verbs

verbs = typer.Typer(
    cls=Verbs,
    help="Write distributed training yourself: exercises, checked on real processes.",
    no_args_is_help=True,
)
puzzle = typer.Typer(
    cls=Verbs,
    help="Find the bug in a training script, with Drivetrain's own tools.",
    no_args_is_help=True,
)
verbs.add_typer(puzzle, name="puzzle")
PuzzleName = Annotated[str, typer.Argument(metavar="PUZZLE")]
ExerciseName = Annotated[
    str,
    typer.Argument(
        metavar="[EXERCISE]", help="Default: the last one checked; once it has passed, the next."
    ),
]


@verbs.command(name="list")
def list_all() -> None:
    """List all phases and exercises."""
    from drivetrain.cli.learn import show_list

    show_list()


@verbs.command()
def start(
    phase: Annotated[str, typer.Argument(metavar="PHASE", help="1, 2, 3, 4 or labs.")],
) -> None:
    """Copy a phase's templates and guidelines to this folder; overwrites nothing."""
    from drivetrain.cli.learn import start_phase

    start_phase(phase)


@verbs.command()
def check(
    exercise: ExerciseName = "",
    phase: Annotated[str, typer.Option(help="All exercises of a phase.")] = "",
) -> None:
    """Run an exercise's checks on real processes; exit code 1 if a check fails."""
    from drivetrain.cli.learn import check_exercises

    raise typer.Exit(check_exercises(exercise, phase))


@verbs.command()
def hint(exercise: ExerciseName = "") -> None:
    """Show a hint for what the last check found; run it again for the next hint."""
    from drivetrain.cli.learn import show_hint

    show_hint(exercise)


@verbs.command()
def solution(exercise: ExerciseName = "") -> None:
    """Write the solution into solutions/, once you have tried the exercise."""
    from drivetrain.cli.learn import write_solution

    write_solution(exercise)


@verbs.command()
def progress() -> None:
    """Show what is done, with your scores, the solution's and the physical limit."""
    from drivetrain.cli.learn import show_progress

    show_progress()


@verbs.command()
def done(
    item: Annotated[str, typer.Argument(metavar="ITEM", help="lecture-1 … lecture-7, project")],
) -> None:
    """Mark as done what no program can check: a lecture you read, the project you handed in."""
    from drivetrain.cli.learn import mark_done

    mark_done(item)


@verbs.command()
def quiz(
    question: Annotated[
        int | None, typer.Option(metavar="N", help="Ask this question, even if answered.")
    ] = None,
) -> None:
    """Ask 25 questions, one at a time, with explanations; most you can answer by running code."""
    from drivetrain.cli.learn import ask_quiz

    ask_quiz(question)


@puzzle.command(name="list")
def list_puzzles() -> None:
    """List all puzzles, with the symptom that a user would report."""
    from drivetrain.cli import puzzles

    puzzles.show_list()


@puzzle.command(name="start")
def start_puzzle(name: PuzzleName) -> None:
    """Copy the script to this folder, and print the symptom and what to run."""
    from drivetrain.cli import puzzles

    puzzles.start(name)


@puzzle.command(name="check")
def check_puzzle(
    name: PuzzleName,
    line: Annotated[int, typer.Argument(metavar="LINE", help="Line of the script.")],
) -> None:
    """Check whether the bug is in LINE; exit code 1 if it is not."""
    from drivetrain.cli import puzzles

    raise typer.Exit(puzzles.check(name, line))


@puzzle.command(name="hint")
def hint_for_puzzle(name: PuzzleName) -> None:
    """Show a hint; run it again for the next one."""
    from drivetrain.cli import puzzles

    puzzles.show_hint(name)


@puzzle.command(name="solution")
def solution_of_puzzle(name: PuzzleName) -> None:
    """Write the fixed script and why into solutions/, once you have tried the puzzle."""
    from drivetrain.cli import puzzles

    puzzles.write_solution(name)

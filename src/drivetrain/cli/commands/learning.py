"""Learn distributed training by writing it."""

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
    """All phases and exercises."""
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
    """Run an exercise's checks on real processes; exit code 1 when something is not right yet."""
    from drivetrain.cli.learn import check_exercises

    raise typer.Exit(check_exercises(exercise, phase))


@verbs.command()
def hint(exercise: ExerciseName = "") -> None:
    """A hint for what the last check found; again for the next one."""
    from drivetrain.cli.learn import show_hint

    show_hint(exercise)


@verbs.command()
def solution(exercise: ExerciseName = "") -> None:
    """Write the solution into solutions/, after a try of your own."""
    from drivetrain.cli.learn import write_solution

    write_solution(exercise)


@verbs.command()
def progress() -> None:
    """What is done, and scores beside the solution's and the physical limit."""
    from drivetrain.cli.learn import show_progress

    show_progress()


@verbs.command()
def done(
    item: Annotated[str, typer.Argument(metavar="ITEM", help="lecture-1 … lecture-7, project")],
) -> None:
    """Tick off what no program can see: a lecture that was read, the project handed in."""
    from drivetrain.cli.learn import mark_done

    mark_done(item)


@verbs.command()
def quiz(
    question: Annotated[
        int | None, typer.Option(metavar="N", help="Ask this one, answered or not.")
    ] = None,
) -> None:
    """25 questions, one at a time, each with its explanation; most are answered by running."""
    from drivetrain.cli.learn import ask_quiz

    ask_quiz(question)


@puzzle.command(name="list")
def list_puzzles() -> None:
    """All puzzles, by what a user would report."""
    from drivetrain.cli import puzzles

    puzzles.show_list()


@puzzle.command(name="start")
def start_puzzle(name: PuzzleName) -> None:
    """Copy the script to this folder, and tell the symptom and what to run."""
    from drivetrain.cli import puzzles

    puzzles.start(name)


@puzzle.command(name="check")
def check_puzzle(
    name: PuzzleName, line: Annotated[int, typer.Argument(metavar="LINE", help="Of the script.")]
) -> None:
    """Whether the bug is in LINE; exit code 1 when it is not."""
    from drivetrain.cli import puzzles

    raise typer.Exit(puzzles.check(name, line))


@puzzle.command(name="hint")
def hint_for_puzzle(name: PuzzleName) -> None:
    """A hint; again for the next one."""
    from drivetrain.cli import puzzles

    puzzles.show_hint(name)


@puzzle.command(name="solution")
def solution_of_puzzle(name: PuzzleName) -> None:
    """Write the script put right into solutions/, after a try of your own, and why."""
    from drivetrain.cli import puzzles

    puzzles.write_solution(name)

"""Names, options and help of the commands. Their code is imported when they are called."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup


class Verbs(TyperGroup):
    """Lists commands with the whole first sentence of their help; click cuts it to one line."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        listed = [(name, self.commands[name]) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, verb.get_short_help_str(limit=1000)) for name, verb in listed]
            )


# Arguments and options of several commands.

Run = Annotated[str, typer.Argument(metavar="RUN", help="Directory of the run.")]

RunAddress = Annotated[
    str, typer.Argument(metavar="RUN", help="A run's directory, or its address (s3://…).")
]

Address = Annotated[
    str, typer.Argument(help="A run's directory, a folder of checkpoints, or an address (s3://…).")
]

OneCheckpoint = Annotated[
    str, typer.Argument(help="A checkpoint; for a run or a folder, its newest good one.")
]

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

Trust = Annotated[
    bool, typer.Option("--trust", help="Act although other users could have written its job.json.")
]

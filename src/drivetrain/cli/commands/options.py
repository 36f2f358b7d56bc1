"""Arguments and options that several verbs take."""

from __future__ import annotations

from typing import Annotated

import typer

Run = Annotated[str, typer.Argument(metavar="RUN", help="The run's directory.")]

RunAddress = Annotated[
    str, typer.Argument(metavar="RUN", help="A run's directory, or its address (s3://…).")
]

Address = Annotated[
    str, typer.Argument(help="A run's directory, a folder of checkpoints, or an address (s3://…).")
]

OneCheckpoint = Annotated[
    str, typer.Argument(help="One checkpoint; of a run or a folder, the newest good one.")
]

AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]

Trust = Annotated[
    bool, typer.Option("--trust", help="Though others could have written its job.json.")
]

"""The console script. The version is told at once, without loading the command line library."""

from __future__ import annotations

import sys

from drivetrain._version import __version__


def main() -> None:
    if sys.argv[1:] == ["--version"]:
        sys.stdout.write(f"{__version__}\n")
        return
    from drivetrain.cli.main import main as run

    run()

"""The console script. `--version` is answered without importing the command line library."""

from __future__ import annotations

import sys

from drivetrain._version import __version__


def main() -> None:
    if sys.argv[1:] == ["--version"]:
        sys.stdout.write(f"{__version__}\n")
        return
    from drivetrain.cli.main import main as run

    run()

"""Checks the phase whose number is in this file's name: `drivetrain learn check --phase`."""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    from drivetrain.cli.learn import check_exercises

    here = Path(__file__)
    sys.exit(check_exercises("", here.stem.removeprefix("test_phase"), here.parent))

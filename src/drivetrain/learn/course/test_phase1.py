"""Checks every exercise of phase 1: the same as `drivetrain learn check --phase 1`."""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    from drivetrain.cli.learn import check_exercises

    sys.exit(check_exercises("", "1", Path(__file__).parent))

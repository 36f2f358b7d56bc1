"""Checks every exercise of phase 3: the same as `drivetrain learn check --phase 3`."""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    from drivetrain.cli.learn import check_exercises

    sys.exit(check_exercises("", "3", Path(__file__).parent))

"""`python -m drivetrain.cli` is `drivetrain`."""

from drivetrain.cli.main import main

if __name__ == "__main__":
    main()

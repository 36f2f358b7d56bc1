"""`python -m drivetrain` is `drivetrain`."""

from drivetrain.cli.entry import main

if __name__ == "__main__":
    main()

"""Studies of `drivetrain tune`, beside Optuna and Ray Tune."""

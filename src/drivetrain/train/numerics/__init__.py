"""Switches that decide a step's numbers: precision, TF32, bitwise reproducibility."""

"""Settings that affect a step's results: precision, TF32, bitwise reproducibility."""

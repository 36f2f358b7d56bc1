"""Turn a run directory into findings: what failed or is slow, on which rank, and what to do."""

"""The command line: what commands print; no logic."""

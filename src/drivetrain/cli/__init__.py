"""The command line: what verbs print; no logic."""

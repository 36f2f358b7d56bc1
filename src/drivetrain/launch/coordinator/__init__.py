"""Runs without a scheduler: a coordinator at the client starts each host's part."""

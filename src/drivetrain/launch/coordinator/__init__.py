"""Runs without a scheduler: a coordinator on the client starts each host's part."""

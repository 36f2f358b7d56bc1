"""Runs without a scheduler: a conductor at the desk starts each host's part."""

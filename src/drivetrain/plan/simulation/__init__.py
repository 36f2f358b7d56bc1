"""Simulate what failures cost a long run: event by event, many runs at once."""

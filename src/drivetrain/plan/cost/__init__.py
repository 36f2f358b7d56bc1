"""The cost of one way to run a step, in bytes, seconds and money."""

"""What one way to run a step takes, in bytes, seconds and money."""

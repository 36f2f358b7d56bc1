"""Known training patterns: the original next to the same here, on 1 and 2 processes, and killed."""

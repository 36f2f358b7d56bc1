"""Reading a run's record, at the size of thousands of ranks."""

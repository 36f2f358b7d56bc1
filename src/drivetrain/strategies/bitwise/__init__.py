"""The same bits at any number of ranks."""

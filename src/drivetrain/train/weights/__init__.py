"""Initial weights of a model: recorded and replayed part by part, or read from files."""

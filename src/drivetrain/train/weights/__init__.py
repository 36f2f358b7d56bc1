"""How a model's weights come to be: recorded and replayed part by part, or read from files."""

"""Which samples make up step k, at any world size, and how they reach the model."""

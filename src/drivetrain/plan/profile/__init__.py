"""What a training step of a model takes, found on fake tensors."""

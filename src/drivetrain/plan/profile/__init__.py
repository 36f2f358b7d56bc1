"""Profile a model's training step on fake tensors."""

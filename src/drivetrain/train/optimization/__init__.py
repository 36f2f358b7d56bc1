"""What turns gradients into new weights: optimizers, their groups, the learning rate."""

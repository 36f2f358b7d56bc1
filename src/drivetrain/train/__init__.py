"""Training: the user's task, the loop and its engine, hooks, saving and optimizers."""

"""The loop: what a user brings, how one step is made of it, and who may listen."""

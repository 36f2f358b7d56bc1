"""Starting a script's ranks on a target, and saying why they stopped."""

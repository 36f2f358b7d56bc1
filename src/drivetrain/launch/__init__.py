"""Starting a script's ranks on a target, and reporting why they stopped."""

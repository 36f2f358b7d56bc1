"""Starting a run, by hand and through an engine."""

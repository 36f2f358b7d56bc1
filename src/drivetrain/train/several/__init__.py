"""Training several models together: an engine and an optimizer for each."""

"""Several models trained side by side: an engine and an optimizer for each."""

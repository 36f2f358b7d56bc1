"""tp: where a plan comes from, and what it does to a model."""

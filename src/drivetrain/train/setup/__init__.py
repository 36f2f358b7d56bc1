"""The parts of `assemble`: choices, data and model."""

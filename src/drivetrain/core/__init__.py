"""The lowest layer: errors, units, and optional libraries that are imported on demand."""

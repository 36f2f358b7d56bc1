"""Pages: one file, nothing loaded from anywhere, light and dark, narrow and wide."""

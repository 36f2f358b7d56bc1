"""Charts: values in, a piece of a page out. No state, no files; every text is escaped."""

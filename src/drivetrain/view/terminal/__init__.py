"""The live view in a terminal: the same values as the page, in cells instead of pixels."""

"""The live view in a terminal, which shows the same values as the page."""

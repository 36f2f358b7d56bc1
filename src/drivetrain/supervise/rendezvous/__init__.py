"""Nodes meet in a folder, which does not die with the first of them."""

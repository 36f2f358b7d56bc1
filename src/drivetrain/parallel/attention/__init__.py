"""Attention over a sequence whose parts lie on several ranks, without a mask."""

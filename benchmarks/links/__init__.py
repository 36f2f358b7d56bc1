"""Slow links between real hosts."""

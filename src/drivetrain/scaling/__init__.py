"""Weak and strong scaling: our strategies and bare engines, taking turns on the same ranks."""

"""Weak and strong scaling of our strategies and bare engines, in turns on the same ranks."""

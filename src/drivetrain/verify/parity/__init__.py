"""Parity: does a layout train the same as one process, and if not, where do they first differ?"""

"""Parity: does a layout train what one process trains, and if not, where do the two first part?"""

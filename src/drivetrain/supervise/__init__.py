"""Attempts: who starts workers, watches them, and decides what happens when one dies or stalls."""

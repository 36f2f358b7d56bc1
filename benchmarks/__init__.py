"""Measurements, always next to the bare engine."""

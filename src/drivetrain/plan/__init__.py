"""Fits before you pay: profile → cost → search → plans; simulation of a long run."""

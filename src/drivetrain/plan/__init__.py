"""Fits before you pay: plan, rehearse, simulate."""

"""Certificates for a user's script: parity of layouts, exact resume, recovery from faults."""

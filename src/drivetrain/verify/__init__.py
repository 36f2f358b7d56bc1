"""Certificates for a user's script: parity of layouts, exact resume, survived faults."""

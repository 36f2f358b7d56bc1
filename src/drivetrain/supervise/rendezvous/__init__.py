"""Rendezvous in a shared directory, which survives the loss of any node."""

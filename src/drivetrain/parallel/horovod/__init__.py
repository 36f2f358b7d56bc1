"""Horovod behind the one Strategy interface."""

"""Rehearse the real script at any world size on this machine, before renting a device."""

"""The supervisor: starts the workers, watches them, and decides what to do when one fails."""

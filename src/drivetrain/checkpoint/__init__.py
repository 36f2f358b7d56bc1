"""Checkpoints: sharded, asynchronous, committed by their manifest, verified, re-sharded."""

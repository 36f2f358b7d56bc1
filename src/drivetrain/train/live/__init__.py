"""Replicas that continue without a restart when one of them fails or joins."""

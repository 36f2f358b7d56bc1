"""Replicas that go on without a restart when one of them dies or joins."""

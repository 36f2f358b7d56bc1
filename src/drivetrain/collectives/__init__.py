"""Benchmark collectives: each is checked element by element and timed as a bare call."""

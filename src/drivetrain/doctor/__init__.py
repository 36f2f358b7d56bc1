"""Check whether hosts are fit for a run: gather facts on each host, judge them at the client."""

"""When a run saves, what it goes on from, and the weights it leaves."""

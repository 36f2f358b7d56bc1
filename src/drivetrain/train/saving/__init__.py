"""When a run saves, what it resumes from, and the weights it leaves."""

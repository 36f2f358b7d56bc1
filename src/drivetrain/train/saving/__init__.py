"""When a run saves, what it resumes from, and the final weights it writes."""

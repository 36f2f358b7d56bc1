"""From a run's directory to findings: what went wrong or is slow, who, where, and what to do."""

"""Is this place fit for a run? Facts are gathered on every host, judged at the client."""

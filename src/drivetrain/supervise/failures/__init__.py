"""How an attempt ended: the ranks' dumps, the cause, the message and the report."""

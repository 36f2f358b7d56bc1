"""How an attempt ended: what its ranks say, why it was, who is told and what is written down."""

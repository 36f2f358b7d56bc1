"""The processes of one node: ranks, and warm spares that wait to become one."""

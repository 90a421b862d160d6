"""Several replicas as one model: where they are, how they are, and the Engine that chooses among them.

How it chooses belongs to `routing/`.
"""

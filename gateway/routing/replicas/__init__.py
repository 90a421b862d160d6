"""Several replicas as one model: their state, and the Engine that sends requests to them.

The choice among them belongs to `placement/`.
"""

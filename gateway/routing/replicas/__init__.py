"""Several replicas as one model: their state, and the Engine that sends requests to them.

`placement/` chooses the replica for each request.
"""

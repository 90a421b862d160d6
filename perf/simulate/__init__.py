"""A fleet in simulated time, with the gateway's own policies and the planner's step times.

The policies themselves are in `gateway/routing/`.
"""

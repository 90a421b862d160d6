"""A fleet in simulated time: the gateway's own policies, with replicas at the planner's pace.

The policies themselves belong to `gateway/routing/`.
"""

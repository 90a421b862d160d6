"""The models, their replicas, and the way of a request to one of them.

The protocol of a single server belongs to `triton/`.
"""

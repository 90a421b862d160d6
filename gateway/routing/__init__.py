"""Routing of requests: the models, their replicas, and the path of a request to a replica.

The protocol of a single server belongs to `triton/`.
"""

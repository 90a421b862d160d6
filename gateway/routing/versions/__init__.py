"""Versions of a model: the choice of a version for each request, and its outcome for the judge.

Each version has replicas, a prefix index and failover of its own.
"""

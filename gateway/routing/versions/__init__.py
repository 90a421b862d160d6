"""Versions of a model: the choice of a version for each request, and outcomes for the judge.

Each version has its own replicas, prefix index and failover.
"""

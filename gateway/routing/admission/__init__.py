"""Admission control: the order of waiting requests, their dispatch, and early rejection.

`placement/` chooses the replica. Neither package imports the other.
"""

"""Admission control: the order of waiting requests, the room on replicas, and early rejection.

The choice of a replica belongs to `placement/`; the two do not import each other.
"""

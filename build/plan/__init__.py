"""Capacity planning: memory, speed and cost, computed from an architecture without loading or
running it.

`gpu_specs`, `memory`, `timing`, `speed`, `search` and `report` each know only those before them.
"""

"""Capacity planning: memory, speed and cost of a model.

All of it is computed from an architecture, without loading or running it.

`gpu_specs`, `memory`, `timing`, `speed`, `search` and `report` each know only those before them.
"""

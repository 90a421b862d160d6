"""Shared by the benchmark scripts: start the stack, watch its processes, write down figures.

Nothing here decides what is measured; that is in `benchmarks/`.
"""

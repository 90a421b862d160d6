"""Shared by the benchmark scripts: start the stack, watch its processes, write down figures."""

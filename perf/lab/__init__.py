"""Benchmarks of this project, each with goals that its figures are held to: `python -m
llmops.perf.lab`.

The lab is not part of the wheel. The commands for users (`llmops bench`, `verify`, `simulate`) are
beside it in `perf/`.
"""

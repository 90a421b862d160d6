"""Benchmarks of this project: `python -m llmops.perf.lab`.

Each has goals that its figures are held to.

The lab is not part of the wheel. The commands for users (`llmops bench`, `verify`, `simulate`) are
beside it in `perf/`.
"""

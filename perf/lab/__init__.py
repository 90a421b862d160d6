"""Benchmarks of this project: `python -m llmops.perf.lab`.

Each benchmark compares its figures with goals. The lab is not part of the wheel; the commands for
users (`llmops bench`, `verify`, `simulate`) are beside it in `perf/`.
"""

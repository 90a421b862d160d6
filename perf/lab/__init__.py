"""How this project measures and tries itself: benchmarks, peers, the mock engine, faults, the fuzzer.

Not part of the wheel: what users run (`llmops bench`, `verify`, `simulate`) is beside it in `perf/`.
"""

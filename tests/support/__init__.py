"""Support for tests, faults and benchmarks: the mock engine, scripted servers, real servers and processes."""

"""How this project measures itself: benchmarks, peers, the mock engine, the fuzzer. Not part of the wheel."""

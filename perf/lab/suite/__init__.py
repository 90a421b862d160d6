"""`make bench`: every benchmark, into docs/performance.md."""

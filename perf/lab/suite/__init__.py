"""`make bench`: every benchmark, into docs/performance.md.

Which parts there are, how long each may take and the page; what they measure is in `benchmarks/` and `peers/`.
"""

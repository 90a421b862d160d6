"""Rate limits and budgets: reserved before the work and settled to its real usage.

`buckets` is the arithmetic; `memory` keeps the limits of one gateway, `redis` those of several;
`gate` is what a request passes.
"""

"""Scheduling of requests: arrival processes, a closed loop, the runner, and the rate search.

`report/` computes the figures from the records.
"""

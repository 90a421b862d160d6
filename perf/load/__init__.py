"""Scheduling of requests: arrival processes, closed loop, the runner, the search for the highest
rate.

`report/` computes the figures.
"""

"""Scheduling of requests.

There are arrival processes, a closed loop, the runner, and the search for the highest rate.

`report/` computes the figures.
"""

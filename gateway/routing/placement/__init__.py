"""The choice of a replica for a request: pure functions and tables without a clock or an event
loop.

The time of dispatch belongs to `admission/`.
"""

"""Metrics, traces, the access log and the lag of the event loop.

Observes only, and decides nothing.

Billing belongs to `usage/`.
"""

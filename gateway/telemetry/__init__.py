"""Metrics, traces, the access log and the lag of the event loop.

The package only observes requests and makes no decisions about them.

Billing belongs to `usage/`.
"""

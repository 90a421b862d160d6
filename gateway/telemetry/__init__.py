"""Metrics, traces, the access log and the event loop's lag.

This package only observes requests; it makes no decisions about them. Billing belongs to `usage/`.
"""

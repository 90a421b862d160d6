"""Chaos for usage: kill every process between a request and its bill, then audit the ledger.

The package `kills` kills replicas under their streams.
"""

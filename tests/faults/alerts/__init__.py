"""Faults behind the alerts of deploy/alerts: each alert must fire under its fault and stop when the fault is mended."""

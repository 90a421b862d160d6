"""Render a plan for the terminal, as HTML page and as Prometheus recording rules.

The choice of the best layout belongs to `search/`.
"""

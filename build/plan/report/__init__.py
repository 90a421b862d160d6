"""Reports of a plan: terminal, HTML page and recording rules.

The choice of the best candidate belongs to `search/`.
"""

"""Who asks, and the share of what is scarce that each of them gets.

Where a request is served, and when, belongs to `fleet/`.
"""

"""A real Prometheus that scrapes a stack with planted faults: do the rules of deploy/ see them?

The rules' own unit cases are in `deploy/alerts/`.
"""

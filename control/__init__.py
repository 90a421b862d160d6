"""Administration, usage reports and the billing ledger.

Nothing in this package runs during a request for an answer.
"""

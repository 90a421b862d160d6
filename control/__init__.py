"""Administration, usage reports, the billing ledger and roll-outs.

No code of this package runs while a gateway answers a request to a model.
"""

"""What was used, and what it cost: counted as it grows, written down before an answer ends, shipped to the ledger.

`meter` and `page` count, `journal` keeps, `ship` carries to a sink (`direct`, `kafka`), `check` is the door's; `cost`
has the prices.
"""

"""Usage: the price of each request, and the delivery of its event to the ledger.

`outbox_writer` turns requests into events, `open_answers` keeps those of a killed process, `outbox`
stores events in SQLite, and `delivery` sends them to a sink (`ledger_sink`, `kafka`). `usage_check`
joins them; `billing` has the prices.
"""

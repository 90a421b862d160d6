"""Usage: the price of each request, and the delivery of its event to the ledger.

`outbox_writer` turns requests into events, `open_answers` keeps the usage of running answers when a
process is killed, `outbox` stores events in SQLite, and `delivery` sends them to a sink
(`ledger_sink`, `kafka`). `usage_check` connects these modules; `billing` has the prices.
"""

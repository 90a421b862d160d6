"""What is kept: accounts, prices, usage, conversations, the audit log; one schema for SQLite and PostgreSQL.

Who may do what belongs to `control/` and `gateway/callers/`; counters of the moment to `gateway/ratelimit/`.
"""

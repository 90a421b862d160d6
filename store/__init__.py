"""The database: accounts, prices, usage, conversations, responses, roll-outs and the audit log.

One schema serves SQLite and PostgreSQL. Permissions belong to `control/` and `gateway/auth/`, rate
limits to `gateway/ratelimit/`.
"""

"""What is kept: accounts, prices, usage, conversations, the audit log; one schema for SQLite and PostgreSQL."""

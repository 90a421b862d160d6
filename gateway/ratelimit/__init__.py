"""Rate limits and budgets: reserved before the work, settled with its real usage.

`rate_limit_check` is the check of every request, `limits` reserves and settles, and `quotas` holds
what one caller's quotas demand. `buckets` is the arithmetic. `memory` keeps the limits of one
gateway, `redis` those of several. `read_limit` and `buffered_bytes` are checks of their own.

All of these limit callers. The slots of an engine, which limit a model, belong to
`routing/engine_slots.py`, and the order of waiting requests to `routing/admission/`.
"""

"""Rate limits and budgets, reserved before a request runs and settled with its real usage.

`rate_limit_check` applies the limits to every request, `limits` reserves and settles, and `quotas`
computes the limits of one caller's quotas. `buckets` is the arithmetic. `memory` keeps the limits
of one gateway, `redis` the limits that several gateways share. `read_limit` and `buffered_bytes`
are separate checks.

All of these limit callers. The slots of an engine, which limit a model, belong to
`routing/engine_slots.py`, and the order of waiting requests belongs to `routing/admission/`.
"""

"""Authentication of requests: API keys, tokens (JWT), and the callers that they identify.

The gateway asks for keys only if the settings have a `store` or `oidc`. The quotas of a caller are
the subject of `ratelimit/`.
"""
